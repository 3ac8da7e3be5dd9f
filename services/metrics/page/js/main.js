// Puts the page together: the feed says that something changed, the next frame shows it.

import { AlertList } from "./alerts.js";
import { clockText } from "./chart.js";
import { followEfficiency } from "./efficiency.js";
import { followTheme } from "./colors.js";
import { drawControls, makeControls } from "./controls.js";
import { depthsByScope } from "./depths.js";
import { rowsOf, save } from "./export.js";
import { Feed } from "./feed.js";
import { Decisions } from "./happened/decisions.js";
import { LEGEND } from "./happened/event.js";
import { HappenedList } from "./happened/list.js";
import { HeatMap } from "./heat.js";
import { listen } from "./keys.js";
import { followLatency } from "./latency.js";
import { offerLogout } from "./logout.js";
import { Moves } from "./moves.js";
import { LIVE_WINDOW_MS } from "./phases.js";
import { makeStack } from "./stack.js";
import { Steps } from "./steps.js";
import { makePressureChart, makeTrafficCharts } from "./status/charts.js";
import { StatusFeed } from "./status/feed.js";
import { Gauges } from "./status/gauges.js";
import { drawObserved } from "./status/observed.js";
import { VerdictPanel } from "./status/verdict.js";
import { span as spanText } from "./status/words.js";
import { figuresOf, Replay } from "./replay.js";
import { groupScope, splitScope } from "./store.js";
import { drawSummary } from "./summary.js";
import { Tables } from "./tables.js";
import { ForecastTab } from "./tabs/forecast.js";
import { ModelsTab } from "./tabs/models.js";
import { makeTabs, Poll } from "./tabs/tabs.js";
import { makeTrend } from "./trend.js";
import { View } from "./view.js";
import { RoleControl } from "./worker/role.js";

const FIGURE_MS = 2000; // what the figures at the top and in the tables are of
const TABLES_MS = 500; // how often tables are filled
const TRAFFIC_MS = 1000; // how often traffic is drawn: its windows are of seconds
const BEHIND_MS = 2000; // data that are older are not called live
const AGE_MS = 400; // how often the age is written
const ROLE_WINDOWS = 4; // the newest may not have come of a worker yet
const SILENCES_MS = 5000;
const DRAW_MS = 50; // between two pictures at least: changes come more often than anybody sees

const NOBODY = "No worker has reported. Figures appear once one sends telemetry.";

const $ = (id) => document.getElementById(id);
const view = new View();
const feed = new Feed();
let wanted = false, drawnAt = 0, tablesAt = 0, trafficAt = 0, tablesTimer = 0, marks = [], stepsOf = null, agedAt = 0, span = [0, 1], bounds = [0, 1];

const shared = { bounds: () => bounds, marks: () => marks, windowSeconds: () => feed.shown.windowMs / 1000, onCursor: showTime };
const status = new StatusFeed();
const verdict = new VerdictPanel();
const gauges = new Gauges($("pressures"), (scope) => view.set({ scope }));
const ofStatus = { ...shared, windowSeconds: () => status.windowMs / 1000, onCursor: () => {} };
const pressure = makePressureChart($("pressure"), ofStatus);
const traffic = makeTrafficCharts($("traffic"), { ...ofStatus, marks: () => [] });
const trend = makeTrend($("trend"), shared);
const stack = makeStack($("stack"), shared);
const heat = new HeatMap($("heat"), $("heat-point"), open);
const tables = new Tables($("tables"), {
  onScope: (scope) => view.set({ scope }),
  onOrder: (key) => view.set({ order: view.order === key ? `-${key}` : key }),
});
const steps = new Steps($("steps"));
const roleControl = new RoleControl();
const drawTabs = makeTabs(view, { forecast: new ForecastTab(() => (status.now?.models ?? []).map(({ model }) => model)), models: new ModelsTab() });
const alertList = new AlertList($("badge"), $("alerts"), $("quiet"), () => {
  view.set({ tab: "live" });
  requestAnimationFrame(() => $("alerts").scrollIntoView({ block: "nearest" }));
});
const moves = new Moves($("moves"), $("move"));
const happened = new HappenedList($("events"), $("event-kind"), (unixMs) => goTo(unixMs + (view.rangeOf.windowMs * view.rangeOf.columns) / 2));
$("event-kind").addEventListener("change", redraw);
for (const [sign, words] of LEGEND) $("marks-legend").appendChild(document.createElement("span")).textContent = `${sign} ${words}`;
/** The scope that a worker's lies in: of a rank its group, of all others the node. */
function above(id) {
  const member = feed.shown.members[feed.shown.slots.get(id)];
  return member && (groupScope(member) ?? `node:${member.node}`);
}
const applyTheme = followTheme(view, () => {
  heat.invalidate();
  redraw();
});
offerLogout();
const replay = new Replay(view, feed);
listen(makeControls(view, { pause, replay, goTo, save: (kind) => save(kind, `fulcrum-${view.scope.replace(/\W+/g, "-")}`, rowsOf(feed.shown, view.scope, ...span)), above }));

// Whatever changes the view, a button, the browser's back or a link, the feed follows.
let shown = { range: view.range, endMs: view.endMs };
view.addEventListener("change", () => {
  applyTheme();
  // While what lies ahead is loaded the feed is there already, and the view is to stay.
  const moved = shown.endMs !== view.endMs && feed.endMs !== view.endMs;
  if (moved || shown.range !== view.range) {
    replay.stop();
    feed.look(view.rangeOf, view.endMs);
  }
  shown = { range: view.range, endMs: view.endMs };
  tablesAt = 0;
  redraw();
});
feed.addEventListener("change", redraw);
status.addEventListener("change", () => {
  trafficAt = 0;
  redraw();
});
replay.addEventListener("change", () => {
  tablesAt = 0;
  redraw();
});
feed.addEventListener("status", () => {
  const stale = !feed.connected && feed.problem !== "";
  document.body.classList.toggle("stale", stale);
  $("stale").hidden = !stale;
  if (stale) $("stale").textContent = `Not live: ${feed.problem}.${feed.paused || feed.live.newest < 0 ? "" : ` Figures are those of ${clockText(feed.nowMs / 1000)}.`}`;
  redraw();
});
new ResizeObserver(redraw).observe($("heat"));

feed.start(view.rangeOf, view.endMs);
status.start();
new Poll(() => feed.alerts.loadSilences().then(redraw), SILENCES_MS).start();
const decisions = new Decisions($("decisions").tBodies[0], $("decisions-note"), $("move"));
feed.addEventListener("decision", () => decisions.ask());
decisions.follow();
steps.follow(() => stepsOf);
followLatency($("latency"), $("latency-note"), () => view.endMs);

const offsets = new Map(); // of nodes' clocks
followEfficiency($("efficiency"), offsets, () => ({ scope: view.scope, endMs: view.endMs }));

function pause() {
  replay.stop();
  if (feed.paused) return view.set({ end: "" });
  const endMs = Math.floor((feed.nowMs - feed.settledMs) / LIVE_WINDOW_MS) * LIVE_WINDOW_MS;
  feed.freeze(endMs);
  view.set({ end: String(endMs) });
}

/** Show what was then; what is not over yet is live. */
function goTo(unixMs) {
  if (!unixMs) return;
  const endMs = Math.floor(unixMs / LIVE_WINDOW_MS) * LIVE_WINDOW_MS;
  view.set({ end: endMs < feed.latestMs - feed.settledMs ? String(endMs) : "" }, { back: true });
}

/** A worker that is pointed at, and once it is open the moment too, for the steps that ran up to it. */
function open(id, unixMs) {
  if (view.scope === `worker:${id}`) goTo(unixMs);
  else view.set({ scope: `worker:${id}` });
}

function redraw() {
  if (wanted) return;
  wanted = true;
  setTimeout(() => requestAnimationFrame(draw), Math.max(drawnAt + DRAW_MS - performance.now(), 0));
}

function draw(now) {
  [wanted, drawnAt] = [false, now];
  drawStatus();
  drawTabs();
  if (view.tab !== "live") return alertList.draw(feed.alerts);
  const store = feed.shown, { live } = feed;
  const last = view.endMs ? Math.floor((view.endMs - 1) / store.windowMs) : store.newest < 0 ? Math.floor(feed.latestMs / store.windowMs) : store.newest;
  span = [last - feed.range.columns + 1, last];
  bounds = [(span[0] * store.windowMs) / 1000, ((last + 1) * store.windowMs) / 1000];
  alertList.draw(feed.alerts);
  const events = [...feed.events, ...feed.alerts.changes];
  marks = moves.draw(events, 1000 * bounds[0], 1000 * bounds[1]);
  $("marks-legend").hidden = marks.length === 0;
  drawWhatStands(now);
  const series = store.series(view.scope);
  trend.draw(store, series, ...span);
  stack.draw(store, series, ...span);
  heat.draw(store, live, view.scope, view.sort, ...span);
  const figures = figuresOf(live, store, { endMs: view.endMs, settledMs: feed.nowMs - feed.settledMs, figureMs: FIGURE_MS });
  const depths = feed.depths && depthsByScope(live, feed.depths, feed.ids, view.scope);
  const { asOfMs, windowMs } = figures;
  $("latency-of").hidden = view.scope === "cluster";
  const [kind, worker] = splitScope(view.scope);
  stepsOf = kind === "worker" ? { worker, endMs: asOfMs, windowMs, past: feed.paused } : null;
  roleControl.draw(kind === "worker" && !feed.paused ? worker : null, roleOf(store, worker, last));
  drawSummary(figures.store.total(view.scope, figures.last, figures.count), depths, feed.queues, { asOfMs, windowMs, scope: view.scope });
  if (now - tablesAt >= TABLES_MS) {
    tablesAt = now;
    tables.draw(figures.store, { depths, offsets, lives: livesNow() }, view, figures.last, figures.count);
    happened.draw(events, view.endMs);
    drawControls(view, { paused: feed.paused, playing: replay.playing, nowMs: feed.nowMs, above });
    $("as-of").textContent = `${windowMs / 1000} s to ${figures.past ? new Date(asOfMs).toLocaleString([], { hourCycle: "h23" }) : clockText(asOfMs / 1000, 1)}`;
    $("empty").hidden = !feed.connected || feed.loading || heat.gpus > 0;
    $("empty").textContent = missing();
    document.title = `${$("ratio").textContent} : 1 – Fulcrum`;
  } else {
    // What stands still is drawn once, and the tables are to be of it too.
    tablesTimer ||= setTimeout(() => {
      tablesTimer = 0;
      redraw();
    }, TABLES_MS);
  }
}

/** That a worker has at the end of the picture, as far as it is known. */
function roleOf(store, worker, last) {
  const slot = store.slots.get(worker);
  return slot === undefined ? "" : ([...store.rolesIn(slot, last - ROLE_WINDOWS, last)][0] ?? "");
}

/** The verdict, pressure and traffic, of now or of the moment that the view ends at. */
function drawWhatStands(now) {
  const { columns, windowMs } = view.rangeOf;
  status.look(columns * windowMs, view.endMs, feed.latestMs);
  const [times, rows] = status.rows(1000 * bounds[0], 1000 * bounds[1]);
  pressure.draw(times, rows, view.scope);
  if (now - trafficAt < TRAFFIC_MS) return;
  trafficAt = now;
  traffic.draw(times, rows);
  drawObserved(status.now);
  const past = view.endMs === null ? null : status.at(view.endMs);
  if (view.endMs === null) verdict.draw(status.now, status.problem);
  else verdict.drawPast(past?.verdict ?? null, view.endMs);
  const models = view.endMs === null ? (status.now?.models ?? []) : modelsOf(past?.row);
  $("pressures").hidden = models.length === 0;
  gauges.draw(models, { past: view.endMs !== null });
}

/** States of workers that do not simply run, by id; of times past none is known. */
const livesNow = () => new Map(view.endMs === null ? (status.now?.workers ?? []).filter(({ life }) => life !== "running").map(({ id, life }) => [id, life]) : []);

const modelsOf = (row) => Object.entries(row?.models ?? {}).map(([model, point]) => ({ model, prefill: { pressure: point.prefill }, decode: { pressure: point.decode } }));

function drawStatus() {
  const behind = feed.behindMs > BEHIND_MS ? `${Math.floor(feed.behindMs / 1000)} s behind` : "";
  const said = feed.problem || (!feed.connected ? "connecting" : feed.loading ? "loading" : feed.paused ? "paused" : behind || "live");
  if ($("status").textContent !== said) $("status").textContent = said;
  $("status").className = feed.problem || said === behind ? "poor" : said === "live" ? "good" : "";
  drawAge(said);
}

/** How old the picture is: of what moves to a tenth of a second, of the past as a time. */
function drawAge(said) {
  if (performance.now() - agedAt < AGE_MS) return;
  agedAt = performance.now();
  const text = said === "live" && feed.ageMs !== null ? `${spanText(feed.behindMs)} old` : feed.paused ? `${spanText(feed.latestMs - feed.endMs)} ago` : "";
  if ($("age").textContent !== text) $("age").textContent = text;
}

/** Why nothing is shown. */
function missing() {
  if (view.scope !== "cluster" && feed.shown.members.length) return `Of ${view.scope.replace(":", " ")} nothing is known in the time shown.`;
  return feed.paused ? "Nothing is stored for the time shown." : NOBODY;
}

/** Time and shares where the cursor is, below the charts. */
function showTime(index) {
  const row = index == null ? undefined : rowsOf(feed.shown, view.scope, span[0] + index, span[0] + index)[0];
  if (!row) {
    $("chart-point").textContent = "";
    return;
  }
  const share = (value) => (row.covered_gpu_ns ? `${((100 * value) / row.covered_gpu_ns).toFixed(0)} %` : "–");
  const images = row.encode_gpu_ns ? ` (images ${share(row.encode_gpu_ns)})` : "";
  $("chart-point").textContent =
    `${clockText(row.start_unix_ms / 1000, 1)} prefill ${share(row.prefill_gpu_ns)}${images}, decode ${share(row.decode_gpu_ns)}, ` +
    `KV wait ${share(row.kv_wait_gpu_ns)}, idle ${share(row.idle_gpu_ns)}; coverage ${(100 * row.coverage).toFixed(0)} %${row.provisional ? ", provisional" : ""}`;
}
