"""Tests in Chromium of the page with hostile names, extreme workers and broken links."""

import json

import pytest
from playwright.async_api import expect

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from tests.e2e.page.page_rig import BATCH_NS, MS, WAIT_MS, Worker, figures, half_busy, looking, serving

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(1)</script>',
    "__proto__",
    "constructor",
    "a&b#c:d/e f%20g",
    "\u202emoor eht ni",
    "x" * 400,
)
BUSY_MS = 60_000
"""Bound for a page that draws continuously on a loaded machine."""
OPEN = """scope => {
  const name = document.querySelector(`#tables [data-scope=${CSS.escape(scope)}]`);
  name?.click();
  return name !== null;
}"""
pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.usefixtures("chromium")]


async def test_hostile_names_are_shown_as_text_and_can_be_opened_and_linked() -> None:
    workers = [
        Worker(name, "decode" if number % 2 else "prefill", 0.5, node=name, model=name)
        for number, name in enumerate(HOSTILE)
    ]
    async with serving(*workers) as service, looking(service) as page:
        await figures(page, lambda shown: shown["gpu_ns"]["covered"] == len(HOSTILE) * 2_000 * MS)
        await expect(page.locator(".of-worker tbody tr")).to_have_count(len(HOSTILE), timeout=WAIT_MS)
        assert await page.locator("img").count() == 1  # the page's own
        for kind in ("worker", "node", "model"):
            for name in HOSTILE:
                scope = f"{kind}:{name}"
                await page.wait_for_function(OPEN, arg=scope)
                await figures(page, lambda shown, scope=scope: shown["scope"] == scope)
                await figures(page, lambda shown: shown["gpu_ns"]["covered"] == 2_000 * MS)
                await page.evaluate("document.querySelector('#trail button').click()")
        await expect(page.locator(".of-worker tbody tr")).to_have_count(len(HOSTILE), timeout=WAIT_MS)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    "link", ["range=toString", "range=constructor&sort=valueOf&scope=pool", "end=9999999999999", "end=0000000000001"]
)
async def test_an_invalid_link_still_shows_a_page(link: str) -> None:
    async with serving(*half_busy()) as service, looking(service, f"/#{link}") as page:
        if "end" in link:
            await expect(page.locator("#empty")).to_have_text("Nothing is stored for the time shown.", timeout=WAIT_MS)
            await page.locator("#pause").click()
        await figures(page, lambda shown: shown["coverage"] == 1)


async def test_a_scope_that_is_gone_is_reported() -> None:
    async with serving(*half_busy()) as service, looking(service, "/#scope=model:gone") as page:
        await expect(page.locator("#empty")).to_have_text(
            "Of model gone nothing is known in the time shown.", timeout=WAIT_MS
        )


async def test_a_cluster_without_workers_shows_a_hint_until_a_worker_joins() -> None:
    async with serving() as service, looking(service) as page:
        await expect(page.locator("#empty")).to_contain_text("No worker has reported", timeout=WAIT_MS)
        service.workers["prefill-0"] = Worker("prefill-0", "prefill", 0.5)
        await expect(page.locator("#empty")).to_be_hidden(timeout=WAIT_MS)
        await figures(page, lambda shown: shown["coverage"] == 1)


class Turning(Worker):
    """A worker that has another role in every other pair of batches."""

    def batch(self, start_ns: int, length_ns: int = BATCH_NS) -> StepBatch:
        self.role = ("decode", "prefill")[self.sequence // 2 % 2]
        return super().batch(start_ns, length_ns)


async def test_a_worker_that_changes_role_five_times_a_second_always_counts_in_both_pools() -> None:
    workers = (Worker("prefill-0", "prefill", 0.6), Turning("turning", "decode", 0.3))
    async with serving(*workers) as service, looking(service) as page:
        await figures(page, lambda shown: shown["coverage"] == 1)
        await expect(page.locator(".of-pool tbody tr")).to_have_count(2, timeout=WAIT_MS)
        from_ms = await page.evaluate("""() => {
          window.pools = [];
          setInterval(() => window.pools.push(document.querySelectorAll(".of-pool tbody tr").length), 50);
          return Number(document.getElementById("figures").dataset.asOfUnixMs);
        }""")
        seen = "([ms, least]) => pools.length > least && document.getElementById('figures').dataset.asOfUnixMs >= ms"
        await page.wait_for_function(seen, arg=[from_ms + 3000, 20], timeout=BUSY_MS)
        assert set(json.loads(await page.evaluate("JSON.stringify(window.pools)"))) == {2}


async def test_an_unfinished_window_is_charged_only_with_its_elapsed_time() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        rows = await page.evaluate("""async () => {
          const { Store } = await import("/js/store.js");
          const { rowsOf } = await import("/js/export.js");
          const store = new Store(1000, 10);
          const slot = store.slot({ id: "w", node: "n", model: "m", gpus: 2, engine: "sim" });
          store.put(store.column(5, 400), slot, 3e8, 1e8, 0, 0, 0x81);
          store.settle();
          const then = ["cluster", "worker:w"].map((scope) => rowsOf(store, scope, 5, 5)[0]);
          store.put(store.column(5), slot, 9e8, 1e8, 0, 0, 1);
          store.settle();
          return [...then, ...rowsOf(store, "cluster", 5, 5)];
        }""")
        assert [(row["gpus"], row["coverage"], row["provisional"]) for row in rows] == [
            (2, 0.75, True), (2, 0.75, True), (2, 0.9, False),
        ]  # fmt: skip


async def test_the_page_forgets_workers_that_have_left() -> None:
    async with serving(*half_busy()) as service, looking(service) as page:
        held = await page.evaluate("""async () => {
          const { Live } = await import("/js/live.js");
          const live = new Live(async () => true, () => {});
          const worker = (id) => ({ id, node: id, model: "m", gpus: 1, engine: "sim" });
          let most = 0;
          for (let round = 0; round < 500; round++) {
            live.follow({ version: round + 1, workers: [0, 1, 2, 3].map((index) => worker(`w-${round}-${index}`)) });
            most = Math.max(most, live.store.members.length);
          }
          return most;
        }""")
        assert 4 <= held < 100
