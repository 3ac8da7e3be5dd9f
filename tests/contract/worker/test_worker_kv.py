"""Tests of the KV hand-off between real workers with a small torch engine, through shared memory and as bytes over
gRPC.

Whatever goes wrong on the way ends in KV_LOST and a clean receiver, never in wrong tokens.
"""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv_port import KvChunk
from libs.engine.kv_shared_pool import HEADER_BYTES, PREFIX, file_name
from libs.engine.kv_transfer import BlockExport
from libs.runtime.settings import CommonSettings
from libs.testing.workers.hosts import GatewayProbe, LocalWorker, eventually, gateway_probe, local_worker, submit
from libs.worker import kv_wire

pytestmark = pytest.mark.torch

PROMPT = [(7 * i) % 250 for i in range(400)]
BLOCK = 16
BLOCKS = len(PROMPT) // BLOCK
WAYS = ("shared", "sent")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=260, max_position_embeddings=1024, eos_token_id=257,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model") / "llama"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def torch_settings(model: Path, folder: Path | None, **more: Any) -> dict[str, Any]:
    return {
        "engine": "torch", "device": "cpu", "threads": 1, "model_path": str(model), "model": "llama",
        "kv_memory_mb": 4, "kv_shared_dir": folder, "sim_speedup": 1.0,
    } | more  # fmt: skip


@dataclass
class Pair:
    """A prefill and a decode worker, with a gateway on both."""

    prefill: LocalWorker
    decode: LocalWorker
    to_prefill: GatewayProbe
    to_decode: GatewayProbe
    numbers: int = 0

    async def prefilled(self) -> tuple[int, pb.KvSource, list[int]]:
        """Return a prompt that waits for its receiver, and its first token."""
        self.numbers += 1
        await self.to_prefill.submit(submit(self.numbers, pb.PHASE_PREFILL, PROMPT, model="llama"))
        kv = (await self.to_prefill.event(self.numbers, "prefilled")).kv
        return self.numbers, kv, self.to_prefill.tokens[self.numbers]

    async def decode_from(self, number: int, kv: pb.KvSource, first: list[int]) -> None:
        request = submit(number, pb.PHASE_DECODE, [*PROMPT, *first], prompt_tokens=len(PROMPT), model="llama")
        request.kv.CopyFrom(kv)
        await self.to_decode.submit(request)

    async def moved(self) -> list[int]:
        """Return all tokens of a prompt that was handed over."""
        number, kv, first = await self.prefilled()
        await self.decode_from(number, kv, first)
        await self.to_decode.event(number, "finished")
        return first + self.to_decode.tokens[number]

    async def lost(self) -> str:
        """Return why a hand-off was lost, and check that no token of it was reported or stays at the receiver."""
        number, kv, first = await self.prefilled()
        await self.decode_from(number, kv, first)
        failed = await self.to_decode.event(number, "failed")
        assert failed.code == pb.FAILURE_CODE_KV_LOST
        assert not self.to_decode.tokens[number]
        await eventually(lambda: is_clean(self.decode))
        return str(failed.detail)

    def ways(self) -> list[bool]:
        """Return for each transfer whether it came out of shared memory."""
        return [transfer.shared_memory for batch in self.decode.batches() for transfer in batch.kv_transfers]


def alter_chunks(patched: pytest.MonkeyPatch, alter: Callable[[KvChunk], KvChunk]) -> None:
    """Make senders send other data than their pools contain."""
    take = BlockExport.take

    def altered(export: BlockExport) -> KvChunk | None:
        chunk = take(export)
        return None if chunk is None else alter(chunk)

    patched.setattr(BlockExport, "take", altered)


def is_clean(worker: LocalWorker) -> bool:
    integrity = worker.host.integrity()
    return not (integrity.live_sequences or integrity.referenced_blocks or integrity.leased_handles)


@pytest.fixture(params=WAYS)
async def pair(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> AsyncIterator[Pair]:
    """Yield workers for each route of the hand-over in turn."""
    settings = torch_settings(model, tmp_path if request.param == "shared" else None)
    async with (
        local_worker("prefill-0", "prefill", **settings) as prefill,
        local_worker("decode-0", "decode", **settings) as decode,
        gateway_probe(prefill) as to_prefill,
        gateway_probe(decode) as to_decode,
    ):
        yield Pair(prefill, decode, to_prefill, to_decode)
    assert not list(tmp_path.iterdir())


async def stayed(pair: Pair) -> list[int]:
    """Return the output of the decode worker's engine on its own."""
    await pair.to_decode.submit(submit(900, pb.PHASE_BOTH, PROMPT, model="llama"))
    await pair.to_decode.event(900, "finished")
    return pair.to_decode.tokens[900]


async def test_a_moved_prompt_continues_unchanged_and_telemetry_reports_its_route(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    assert pair.decode.host.assignment.current.budget_tokens == 0
    tokens = await pair.moved()
    again = await pair.moved()
    assert len(tokens) == 8 and again == tokens
    await eventually(lambda: len(pair.ways()) == 2)
    assert pair.ways()[0] is ("shared" in request.node.name)
    transfers = [transfer for batch in pair.decode.batches() for transfer in batch.kv_transfers]
    assert [transfer.blocks for transfer in transfers] == [BLOCKS, 0]  # the second time they are there already
    await eventually(lambda: is_clean(pair.prefill) and is_clean(pair.decode))


@pytest.mark.parametrize("lie", ["bytes", "checksum", "count", "weight", "order", "no checksums"])
async def test_damaged_or_forged_blocks_raise_kv_lost_and_the_next_hand_off_works(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    def damage(chunk: KvChunk) -> KvChunk:
        match lie:
            case "bytes":
                other = memoryview(bytes(chunk.data[0].nbytes))
                return replace(chunk, data=(*chunk.data[:-1], other), pool_blocks=(*chunk.pool_blocks[:-1], 0))
            case "checksum":
                return replace(chunk, checksums=(*chunk.checksums[:-1], chunk.checksums[-1] ^ 1))
            case "count":
                return replace(chunk, blocks=chunk.blocks - 1)
            case "weight":
                return replace(chunk, data_bytes=chunk.data_bytes - 1)
            case "order":
                return replace(chunk, first_block=chunk.first_block + 1)
            case _:
                return replace(chunk, checksums=())

    with monkeypatch.context() as lying:
        alter_chunks(lying, damage)
        assert await pair.lost()
    await eventually(lambda: pair.to_decode.decode_credits == 8)
    tokens = await pair.moved()
    assert len(tokens) == 8


async def test_a_pool_overwritten_while_it_is_read_raises_kv_lost(model: Path, tmp_path: Path) -> None:
    settings = torch_settings(model, tmp_path)
    async with (
        local_worker("prefill-0", "prefill", **settings) as prefill,
        local_worker("decode-0", "decode", **settings) as decode,
        gateway_probe(prefill) as to_prefill,
        gateway_probe(decode) as to_decode,
    ):
        pair = Pair(prefill, decode, to_prefill, to_decode)
        number, kv, first = await pair.prefilled()
        (path,) = [path for path in tmp_path.iterdir() if "prefill-0" in path.name]

        def overwrite(chunk: KvChunk) -> KvChunk:
            with path.open("r+b") as file:
                file.seek(HEADER_BYTES + chunk.pool_blocks[0] * 4096)
                file.write(b"\xff" * 4096)  # not finite as numbers
            return chunk

        with pytest.MonkeyPatch.context() as patched:
            alter_chunks(patched, overwrite)
            await pair.decode_from(number, kv, first)
            assert (await to_decode.event(number, "failed")).code == pb.FAILURE_CODE_KV_LOST
        await eventually(lambda: is_clean(decode))


async def test_blocks_that_the_pool_does_not_have_raise_kv_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    message = kv_wire.chunk_message

    def elsewhere(pull: int, chunk: KvChunk, *, last: bool, in_place: bool) -> pb.KvChunk:
        return message(pull, replace(chunk, pool_blocks=(10**6,) * chunk.blocks), last=last, in_place=True)

    monkeypatch.setattr(kv_wire, "chunk_message", elsewhere)
    said = await pair.lost()
    assert "no block 1000000" in said or "not mapped here" in said


@pytest.mark.parametrize("reason", ["vanished", "another nonce", "another host", "not readable"])
async def test_bytes_are_sent_if_the_senders_file_is_missing(model: Path, tmp_path: Path, reason: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    async with (
        local_worker("prefill-0", "prefill", **torch_settings(model, here)) as prefill,
        local_worker(
            "decode-0", "decode", **torch_settings(model, there if reason == "another nonce" else here)
        ) as decode,
        gateway_probe(prefill) as to_prefill,
        gateway_probe(decode) as to_decode,
    ):
        path = here / file_name("prefill-0", prefill.host.worker().incarnation)
        if reason == "vanished":
            path.unlink()
        elif reason == "another nonce":
            header = bytearray(path.read_bytes())
            header[8:24] = bytes(16)
            (there / path.name).write_bytes(header)
        elif reason == "another host":
            with path.open("r+b") as file:
                file.seek(24)
                file.write(b"0" * 36)
        else:
            path.chmod(0o000)
            path.rename(here / "elsewhere")  # root can read these regardless
        pair = Pair(prefill, decode, to_prefill, to_decode)
        assert len(await pair.moved()) == 8
        await eventually(lambda: pair.ways() == [False])
        await eventually(lambda: is_clean(prefill) and is_clean(decode))


async def test_the_pool_stays_private_if_the_folder_has_no_room(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = torch_settings(model, tmp_path / "absent")
    async with local_worker("prefill-0", "prefill", **settings) as prefill:
        assert prefill.host.engine.capabilities.kv_nonce == b""
    reported = [line for line in "".join(capfd.readouterr()).splitlines() if "private memory" in line]
    assert len(reported) == 1


async def test_a_worker_with_another_layout_refuses_the_sequence(model: Path, tmp_path: Path) -> None:
    async with (
        local_worker("prefill-0", "prefill", **torch_settings(model, tmp_path)) as prefill,
        local_worker("decode-0", "decode", **torch_settings(model, tmp_path, block_size_tokens=32)) as decode,
        gateway_probe(prefill) as to_prefill,
        gateway_probe(decode) as to_decode,
    ):
        pair = Pair(prefill, decode, to_prefill, to_decode)
        number, kv, first = await pair.prefilled()
        await pair.decode_from(number, kv, first)
        refused = await to_decode.event(number, "refused")
        assert refused.code == pb.REFUSAL_CODE_KV_MISMATCH and "KV layout" in refused.detail
        assert is_clean(decode) and prefill.host.integrity().leased_handles == 1


# ---------------------------------------------------------------- receivers that die


@dataclass(frozen=True, slots=True)
class Remote:
    """A worker in another process."""

    settings: CommonSettings
    address: str


def _serve(settings: dict[str, Any], pipe: Connection) -> None:
    """Run a decode worker that reads its first chunk and then stops."""

    async def stuck(*_args: object) -> None:
        pipe.send("pulling")
        await asyncio.Event().wait()

    async def serve() -> None:
        pytest.MonkeyPatch().setattr("libs.engine.kv_transfer.BlockWriter.write", stuck)
        async with local_worker("decode-0", "decode", **settings) as worker:
            pipe.send(worker.address)
            await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def receiver(settings: dict[str, Any]) -> Iterator[tuple[BaseProcess, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(settings, theirs))
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("way", WAYS)
async def test_a_receiver_killed_during_a_pull_leaves_nothing_at_the_sender(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("libs.engine.offers.RETRY_MS", 300)
    monkeypatch.setattr("libs.worker.kv_client.SWEEP_S", 0.05)
    folder = tmp_path if way == "shared" else None
    settings = torch_settings(model, folder)
    async with local_worker("prefill-0", "prefill", **settings) as prefill, gateway_probe(prefill) as to_prefill:
        with receiver(settings) as (process, pipe):
            assert await asyncio.to_thread(pipe.poll, 60)
            remote = Remote(CommonSettings(), pipe.recv())
            async with gateway_probe(remote) as to_decode:
                pair = Pair(prefill, prefill, to_prefill, to_decode)
                await pair.decode_from(*await pair.prefilled())
                assert await asyncio.to_thread(pipe.poll, 30)
                assert prefill.host.integrity().leased_handles == 1
                process.kill()
                # Well before the lease of unread blocks ends, and without a message from the gateway.
                await eventually(lambda: is_clean(prefill), within_s=8)
            await asyncio.to_thread(process.join)  # until then its pool has an owner
            if folder:
                await eventually(lambda: not list(folder.glob(f"{PREFIX}decode-0*")), within_s=8)
