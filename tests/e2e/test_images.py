"""Tests of images in chats with the official `openai` client, on a suite with a small LLaVA."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import pytest_asyncio

pytest.importorskip("torch")

from PIL import Image

from libs.runtime.clock import SystemClock
from libs.runtime.http import bind
from libs.runtime.tasks import TaskOwner
from libs.testing.engines.vision_model import IMAGE_TOKENS, Reference, picture, write_random_llava
from libs.testing.servers.image_host import ImageHost, image_host, reply
from libs.testing.servers.listed_registry import ListedRegistry
from libs.testing.wait import until
from libs.testing.workers.hosts import LocalWorker, RecordingBus, RecordingKvIndex, local_worker
from services.gateway.request.prompt import load_catalog
from services.gateway.run import GatewayPorts, RunningGateway, open_gateway
from services.gateway.settings import GatewaySettings

pytestmark = [pytest.mark.torch, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

MODEL = "small-llava"
TOKENS = 12
# Long enough for a busy machine to see a client leave before it.
FETCH_S = 60
QUESTION = "what is in this picture, and is it a fox?"


class Cluster(NamedTuple):
    url: str
    prefill: LocalWorker
    decode: LocalWorker
    images: ImageHost


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llava(tmp_path_factory.mktemp("model") / MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    registry, clock, tasks = ListedRegistry(), SystemClock(), TaskOwner()
    own: dict[str, Any] = {
        "engine": "torch", "model_path": str(folder), "device": "cpu", "threads": 1, "kv_memory_mb": 8,
    }  # fmt: skip
    ports = GatewayPorts(RecordingBus(), registry, RecordingKvIndex())
    async with (
        image_host() as images,
        local_worker("prefill-0", "prefill", registry=registry, **own) as prefill,
        local_worker("decode-0", "decode", registry=registry, **own) as decode,
        _gateway(folder, images.port, ports, clock, tasks) as running,
    ):
        await until(lambda: len(running.fleet.views()) == 2, what="both workers", timeout_s=60)
        yield Cluster(running.url, prefill, decode, images)
    await tasks.close()


def _gateway(
    folder: Path, images_port: int, ports: GatewayPorts, clock: SystemClock, tasks: TaskOwner
) -> AbstractAsyncContextManager[RunningGateway]:
    own = {"port": 0, "drain_s": 1, "models": {MODEL: str(folder)}, "image_hosts": f"127.0.0.1:{images_port}"}
    own["image_fetch_s"] = FETCH_S
    settings = GatewaySettings.model_validate(own)
    sock, catalog = bind(settings.host, 0, "FULCRUM_GATEWAY_PORT"), load_catalog(settings.models)
    return open_gateway(settings=settings, ports=ports, catalog=catalog, sock=sock, clock=clock, tasks=tasks)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


async def post(url: str, *, json: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(url, json=json)


async def get(url: str) -> str:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.get(url)).text


def url_of(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def question(*files: bytes, text: str = QUESTION) -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": url_of(file), "detail": "low"}} for file in files]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def as_template(files: int, text: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*[{"type": "image"}] * files, {"type": "text", "text": text}]}]


async def answer(client: openai.AsyncOpenAI, messages: list[Any]) -> Any:
    return await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=TOKENS, temperature=0)


@pytest.mark.parametrize("seeds", [(1,), (2,), (1,), (2, 1), (1, 2)])
async def test_an_answer_about_images_equals_that_of_generate(
    client: openai.AsyncOpenAI, reference: Reference, seeds: tuple[int, ...]
) -> None:
    files = [picture(seed) for seed in seeds]
    prompt, expected = reference.chat(as_template(len(files)), files, TOKENS)
    found = await answer(client, question(*files))
    assert found.choices[0].message.content == expected
    assert found.usage.prompt_tokens == len(prompt) > IMAGE_TOKENS * len(files)


async def test_equal_texts_about_different_images_share_no_blocks(
    client: openai.AsyncOpenAI, reference: Reference
) -> None:
    answers = {}
    for seed in (11, 12, 11, 12):
        found = await answer(client, question(picture(seed)))
        expected = reference.chat(as_template(1), [picture(seed)], TOKENS)[1]
        assert found.choices[0].message.content == expected
        answers[seed] = expected
    assert answers[11] != answers[12]


async def test_a_stream_equals_the_answer_in_one_piece(client: openai.AsyncOpenAI, reference: Reference) -> None:
    expected = reference.chat(as_template(1), [picture(3)], TOKENS)[1]
    chunks = await client.chat.completions.create(
        model=MODEL, messages=question(picture(3)), max_tokens=TOKENS, temperature=0, stream=True
    )
    texts = [chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]
    assert "".join(texts) == expected


def bomb() -> bytes:
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.com/fox.png", "FULCRUM_GATEWAY_IMAGE_HOSTS of the gateway, and example.com is none of them"),
        ("fox.png", "the URL is not an image"),
        ("data:image/png;base64,@@@@", "is not base64"),
        (url_of(b"no picture"), "not an image in a known format"),
        (url_of(picture(1, form="TIFF")), "not an image in a known format"),
        (url_of(picture(1)[:-400]), "the image is broken"),
        (url_of(picture(1, form="JPEG")[:-400]), "the image is broken"),
        (url_of(bomb()), "over 16777216 pixels"),
    ],
)
async def test_an_unreadable_image_is_a_400_that_names_its_field(
    client: openai.AsyncOpenAI, url: str, reason: str
) -> None:
    content: list[Any] = [{"type": "text", "text": "and this?"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError) as caught:
        await answer(client, [{"role": "user", "content": content}])
    assert reason in caught.value.message
    assert caught.value.param == "messages[0].content[1].image_url.url"


async def test_too_many_images_and_placeholders_as_text_are_400(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError, match="9 images; 8 are allowed"):
        await answer(client, question(*[picture(1)] * 9))
    for path, own in (("/tokenize", {}), ("/v1/chat/completions", {"max_tokens": 1})):
        found = await post(f"{cluster.url}{path}", json={"model": MODEL, "messages": question(*[b"x"] * 1_000)} | own)
        assert found.status_code == 400, path
        assert "1000 images; 8 are allowed" in found.json()["error"]["message"], path
    with pytest.raises(openai.BadRequestError, match="stands for an image"):
        await answer(client, question(picture(1), text="an <image> here"))
    with pytest.raises(openai.BadRequestError, match="only a user's messages"):
        await answer(client, [{**question(picture(1))[0], "role": "assistant"}, {"role": "user", "content": "x"}])


async def test_tokenize_shows_the_expanded_prompt(cluster: Cluster, reference: Reference) -> None:
    body = {"model": MODEL, "messages": question(picture(1))}
    found = await post(f"{cluster.url}/tokenize", json=body)
    assert found.status_code == 200, found.text
    assert found.json()["tokens"] == reference.chat(as_template(1), [picture(1)], 1)[0]


async def test_anthropics_image_blocks_get_the_same_answer(cluster: Cluster, reference: Reference) -> None:
    expected = reference.chat(as_template(1), [picture(2)], TOKENS)[1]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(2)).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    found = await post(f"{cluster.url}/v1/messages", json=body)
    assert found.status_code == 200, found.text
    assert found.json()["content"][0]["text"] == expected
    source["data"] = base64.b64encode(b"no picture").decode()
    found = await post(f"{cluster.url}/v1/messages", json=body)
    assert found.status_code == 400
    assert "not an image in a known format" in found.json()["error"]["message"]


def by_address(url: str) -> list[Any]:
    return [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}],
        }
    ]


async def test_an_image_by_url_gives_the_same_answer_as_a_data_url(
    client: openai.AsyncOpenAI, cluster: Cluster, reference: Reference
) -> None:
    file = picture(31)
    cluster.images.answers["/fox.png"] = reply(file)
    expected = reference.chat(as_template(1), [file], TOKENS)[1]
    assert (await answer(client, question(file))).choices[0].message.content == expected
    encoded = cluster.prefill.host.engine.load().images_encoded
    url = cluster.images.url("/fox.png")
    found = await answer(client, by_address(url))
    assert found.choices[0].message.content == expected
    assert found.usage.prompt_tokens_details.cached_tokens > 0
    content = [{"type": "image", "source": {"type": "url", "url": url}}, {"type": "text", "text": QUESTION}]
    body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    anthropic = await post(f"{cluster.url}/v1/messages", json=body)
    assert anthropic.json()["content"][0]["text"] == expected
    assert cluster.prefill.host.engine.load().images_encoded == encoded
    metrics = await get(f"{cluster.url}/metrics")
    assert 'fulcrum_gateway_image_fetches_total{outcome="ok"}' in metrics


async def test_images_of_responses_get_the_same_answer_and_are_stored_for_the_next_response(
    client: openai.AsyncOpenAI, cluster: Cluster, reference: Reference
) -> None:
    files = [picture(41), picture(42)]
    cluster.images.answers["/41.png"] = reply(files[0])
    urls = [cluster.images.url("/41.png"), url_of(files[1])]
    images = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    asking: Any = [{"role": "user", "content": [*images, {"type": "input_text", "text": QUESTION}]}]
    first = await client.responses.create(model=MODEL, input=asking, max_output_tokens=TOKENS, temperature=0)
    assert first.output_text == reference.chat(as_template(2), files, TOKENS)[1]
    second = await client.responses.create(
        model=MODEL, input="and now?", previous_response_id=first.id, max_output_tokens=TOKENS, temperature=0
    )
    turns = [*as_template(2), {"role": "assistant", "content": [{"type": "text", "text": first.output_text}]}]
    turns.append({"role": "user", "content": [{"type": "text", "text": "and now?"}]})
    assert second.output_text == reference.chat(turns, files, TOKENS)[1]
    broken: Any = [{"role": "user", "content": [images[0], {**images[1], "image_url": url_of(b"no picture")}]}]
    with pytest.raises(openai.BadRequestError, match="not an image in a known format") as caught:
        await client.responses.create(model=MODEL, input=broken, previous_response_id=first.id)
    assert caught.value.param == "input[0].content[1].image_url"


async def test_a_response_with_a_large_image_can_be_continued(client: openai.AsyncOpenAI) -> None:
    url = url_of(picture(43, width=1200, height=900))
    assert len(url) > 4 * 1024 * 1024, "noise cannot be compressed"
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    asking: Any = [{"role": "user", "content": [image, {"type": "input_text", "text": QUESTION}]}]
    first = await client.responses.create(model=MODEL, input=asking, max_output_tokens=TOKENS)
    assert first.store
    second = await client.responses.create(
        model=MODEL, input="and now?", previous_response_id=first.id, max_output_tokens=TOKENS
    )
    assert second.output_text and second.usage and second.usage.input_tokens > IMAGE_TOKENS


async def test_a_fetched_image_is_checked_as_one_in_a_data_url(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.images.answers["/page.html"] = reply(b"<html>no picture</html>")
    with pytest.raises(openai.BadRequestError, match="not an image in a known format"):
        await answer(client, by_address(cluster.images.url("/page.html")))
    with pytest.raises(openai.BadRequestError, match="the image answered 404, not 200: check the address"):
        await answer(client, by_address(cluster.images.url("/nothing.png")))


async def test_a_client_that_leaves_ends_the_fetch_of_its_image(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.images.answers["/slow.png"] = reply(b"abc", "Content-Length: 1000")
    cluster.images.stalls.add("/slow.png")
    asking = asyncio.create_task(answer(client, by_address(cluster.images.url("/slow.png"))))
    await until(lambda: cluster.images.open == 1, what="the fetch", timeout_s=20)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: cluster.images.open == 0, what="the end of the fetch", timeout_s=FETCH_S / 2)
    metrics = await get(f"{cluster.url}/metrics")
    assert 'fulcrum_gateway_image_fetches_total{outcome="cancelled"} 1.0' in metrics


async def test_only_the_prefill_worker_encodes_an_image(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    before = cluster.prefill.host.engine.load()
    for _ in range(2):
        await answer(client, question(picture(77), picture(78)))
    after, elsewhere = cluster.prefill.host.engine.load(), cluster.decode.host.engine.load()
    assert after.images_encoded == before.images_encoded + 2
    assert after.image_encode_ns > before.image_encode_ns
    assert elsewhere.images_encoded == elsewhere.images_used == 0
    await until(
        # A long step is announced before it ends.
        lambda: (
            sum(step.encoded_images for step in cluster.prefill.steps() if step.end_unix_ns) == after.images_encoded
        ),
        what="telemetry of all encoded images",
    )
    assert any(batch.load.images_encoded == after.images_encoded for batch in cluster.prefill.batches())
    assert sum(len(batch.kv_transfers) for batch in cluster.decode.batches()) > 0
