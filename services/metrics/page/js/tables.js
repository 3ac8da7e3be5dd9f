// Tables of pools, models, nodes and workers; a name opens it as the scope of the page.

import { COVERED, GPU_NS, percent, PHASES, phaseTimes, PROVISIONAL_NS, ratioText, ROLES } from "./phases.js";
import { drawSpark, SPARK } from "./spark.js";

const MAX_ROWS = 50; // of a table; the filter finds the others
const HEADS = ["", "GPUs", "P:D", "prefill", "decode", "KV wait", "idle", "coverage", "trend"];
const CLOCK = "clock ahead"; // of nodes
const DEPTHS = ["running", "waiting", "prompt tokens"];

export class Tables {
  #tables = new Map();

  constructor(host, onScope) {
    for (const kind of ["pool", "model", "node", "worker"]) this.#tables.set(kind, makeTable(host, kind, onScope));
  }

  /** Figures over `count` windows up to number `last`, of what lies in the scope. */
  draw(store, { depths, offsets }, scope, filter, last, count) {
    const inside = store.members.map((_, slot) => slot).filter((slot) => store.inScope(slot, scope) && store.roleOf(slot));
    const names = {
      pool: inside.map((slot) => ROLES[store.roleOf(slot)]),
      model: inside.map((slot) => store.members[slot].model),
      node: inside.map((slot) => store.members[slot].node),
      worker: inside.map((slot) => store.members[slot].id),
    };
    const compare = new Intl.Collator("en", { numeric: true }).compare;
    for (const [kind, table] of this.#tables) {
      const wanted = [...new Set(names[kind])].filter((name) => name.includes(filter)).sort(compare);
      table.count.textContent = wanted.length > MAX_ROWS ? `${MAX_ROWS} of ${wanted.length}: filter to see others` : `${wanted.length}`;
      fill(table, kind, wanted.slice(0, MAX_ROWS), (name) => ({
        series: store.series(`${kind}:${name}`),
        sums: store.total(`${kind}:${name}`, last, count),
        depths: depths?.get(`${kind}:${name}`) ?? [],
        clock: offsets.get(name),
      }), store, last, count);
    }
  }
}

function makeTable(host, kind, onScope) {
  const section = host.appendChild(document.createElement("section"));
  section.className = "panel table";
  const title = section.appendChild(document.createElement("h2"));
  title.textContent = { pool: "Pools", model: "Models", node: "Nodes", worker: "Workers" }[kind];
  const count = title.appendChild(document.createElement("small"));
  const table = section.appendChild(document.createElement("div")).appendChild(document.createElement("table"));
  const head = table.createTHead().insertRow();
  for (const text of [...HEADS, ...DEPTHS, ...(kind === "node" ? [CLOCK] : [])]) head.appendChild(document.createElement("th")).textContent = text;
  const body = table.createTBody();
  body.addEventListener("click", (event) => {
    if (event.target.dataset.scope) onScope(event.target.dataset.scope);
  });
  return { body, count, rows: new Map() };
}

function fill(table, kind, names, figures, store, last, count) {
  for (const [name, row] of table.rows) {
    if (names.includes(name)) continue;
    row.element.remove();
    table.rows.delete(name);
  }
  for (const [index, name] of names.entries()) {
    let row = table.rows.get(name);
    if (!row) table.rows.set(name, (row = makeRow(kind, name)));
    if (table.body.rows[index] !== row.element) table.body.insertBefore(row.element, table.body.rows[index] ?? null);
    const { series, sums, depths, clock } = figures(name);
    const covered = sums[COVERED];
    const texts = [
      Math.round(sums[GPU_NS] / (count * store.windowMs * 1e6)),
      ratioText(sums),
      ...phaseTimes(sums).map((time) => percent(time, covered, 0)),
      percent(covered, sums[GPU_NS], 0) + (sums[PROVISIONAL_NS] ? " ~" : ""),
    ];
    for (const [place, text] of [...texts, ...Array.from(DEPTHS, (_, depth) => depths[depth] ?? "")].entries()) setText(row.cells[place], text);
    if (kind === "node") setText(row.cells.at(-1), clock === undefined ? "–" : `${clock.toFixed(1)} ms`);
    row.element.classList.toggle("uncovered", !covered);
    drawSpark(row.spark, store, series, last);
  }
}

function makeRow(kind, name) {
  const element = document.createElement("tr");
  const button = element.appendChild(document.createElement("th")).appendChild(document.createElement("button"));
  button.textContent = name;
  button.dataset.scope = `${kind}:${name}`;
  const cells = [];
  const spark = document.createElement("canvas");
  [spark.width, spark.height] = [SPARK.width, SPARK.height];
  for (let index = 0; index < 3 + PHASES.length; index++) cells.push(element.insertCell());
  element.insertCell().append(spark);
  for (const _ of [...DEPTHS, ...(kind === "node" ? [CLOCK] : [])]) cells.push(element.insertCell());
  return { element, cells, spark };
}

function setText(cell, text) {
  if (cell.textContent !== String(text)) cell.textContent = text;
}
