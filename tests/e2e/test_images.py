"""Images in chats by the official `openai` client, against a suite on a small LLaVA with random weights."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("torch")

from PIL import Image

from libs.testing.engines.vision_model import IMAGE_TOKENS, Reference, picture, write_random_llava
from libs.testing.suites.suite import RunningSuite, running_suite
from libs.testing.wait import until

pytestmark = [pytest.mark.suite, pytest.mark.torch, pytest.mark.timeout(600)]

MODEL = "small-llava"
TOKENS = 12
START_S = 240.0
QUESTION = "what is in this picture, and is it a fox?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llava(tmp_path_factory.mktemp("model") / MODEL)


@pytest.fixture(scope="module")
def suite(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    arguments = ("--engine", "torch", "--model", str(folder), "--prefill", "2", "--decode", "1")
    with running_suite(tmp_path_factory.mktemp("suite"), *arguments, start_s=START_S) as found:
        yield found


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def url_of(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def asked(*files: bytes, text: str = QUESTION) -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": url_of(file), "detail": "low"}} for file in files]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def as_template(files: int, text: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*[{"type": "image"}] * files, {"type": "text", "text": text}]}]


def answer(client: openai.OpenAI, messages: list[Any]) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=TOKENS, temperature=0)


@pytest.mark.parametrize("seeds", [(1,), (2,), (1,), (2, 1), (1, 2)])
def test_an_answer_about_pictures_is_that_of_generate(
    client: openai.OpenAI, reference: Reference, seeds: tuple[int, ...]
) -> None:
    files = [picture(seed) for seed in seeds]
    prompt, expected = reference.chat(as_template(len(files)), files, TOKENS)
    found = answer(client, asked(*files))
    assert found.choices[0].message.content == expected
    assert found.usage.prompt_tokens == len(prompt) > IMAGE_TOKENS * len(files)


def test_equal_texts_about_different_pictures_share_no_blocks(client: openai.OpenAI, reference: Reference) -> None:
    answers = {}
    for seed in (11, 12, 11, 12):
        found = answer(client, asked(picture(seed)))
        expected = reference.chat(as_template(1), [picture(seed)], TOKENS)[1]
        assert found.choices[0].message.content == expected
        answers[seed] = expected
    assert answers[11] != answers[12]


def test_a_stream_tells_the_same(client: openai.OpenAI, reference: Reference) -> None:
    expected = reference.chat(as_template(1), [picture(3)], TOKENS)[1]
    chunks = client.chat.completions.create(
        model=MODEL, messages=asked(picture(3)), max_tokens=TOKENS, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected


def bomb() -> bytes:
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.com/fox.png", "no image is fetched from an address"),
        ("fox.png", "only images in data URLs are served"),
        ("data:image/png;base64,@@@@", "is not base64"),
        (url_of(b"no picture"), "no image of a known format"),
        (url_of(picture(1, form="TIFF")), "no image of a known format"),
        (url_of(picture(1)[:-400]), "the image is broken"),
        (url_of(picture(1, form="JPEG")[:-400]), "the image is broken"),
        (url_of(bomb()), "over 16777216 pixels"),
    ],
)
def test_an_image_that_cannot_be_read_is_a_400_that_names_its_field(
    client: openai.OpenAI, url: str, reason: str
) -> None:
    content: list[Any] = [{"type": "text", "text": "and this?"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError) as caught:
        answer(client, [{"role": "user", "content": content}])
    assert reason in caught.value.message
    assert caught.value.param == "messages[0].content[1].image_url.url"


def test_too_many_images_and_placeholders_as_text_are_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="9 images; 8 are allowed"):
        answer(client, asked(*[picture(1)] * 9))
    with pytest.raises(openai.BadRequestError, match="stands for an image"):
        answer(client, asked(picture(1), text="an <image> here"))
    with pytest.raises(openai.BadRequestError, match="only a user's messages"):
        answer(client, [{**asked(picture(1))[0], "role": "assistant"}, {"role": "user", "content": "x"}])


def test_tokenize_shows_the_expanded_prompt(suite: RunningSuite, reference: Reference) -> None:
    body = {"model": MODEL, "messages": asked(picture(1))}
    found = httpx.post(f"{suite.gateway}/tokenize", json=body, timeout=30)
    assert found.status_code == 200, found.text
    assert found.json()["tokens"] == reference.chat(as_template(1), [picture(1)], 1)[0]


def test_anthropics_image_blocks_are_answered_alike(suite: RunningSuite, reference: Reference) -> None:
    expected = reference.chat(as_template(1), [picture(2)], TOKENS)[1]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(2)).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    found = httpx.post(f"{suite.gateway}/v1/messages", json=body, timeout=60)
    assert found.status_code == 200, found.text
    assert found.json()["content"][0]["text"] == expected
    source["data"] = base64.b64encode(b"no picture").decode()
    found = httpx.post(f"{suite.gateway}/v1/messages", json=body, timeout=60)
    assert found.status_code == 400
    assert "no image of a known format" in found.json()["error"]["message"]


async def test_encoding_shows_in_steps_and_metrics(suite: RunningSuite, client: openai.OpenAI) -> None:
    for _ in range(2):
        answer(client, asked(picture(77), picture(78)))
    metrics = str(suite.ready["metrics"])

    def shows() -> bool:
        text = httpx.get(f"{metrics}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.startswith("fulcrum_worker_images_encoded_total")]
        return sum(float(line.split()[-1]) for line in lines) >= 2

    await until(shows, timeout_s=60, what="the count of encoded images")
    encodes: list[dict[str, Any]] = []
    for worker in ("prefill-0", "prefill-1"):
        found = httpx.get(f"{metrics}/v1/steps", params={"worker": worker, "window": "1m"}, timeout=30)
        assert found.status_code == 200, found.text
        encodes += [step for step in found.json()["steps"] if step["kind"] == "encode"]
    assert encodes
    assert all(step["prefill_share"] == 1 and step["prefill_tokens"] == 0 for step in encodes)
