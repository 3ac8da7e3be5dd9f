// Tables of pools, models, nodes and workers: a name opens it as the scope of the page, a head puts rows in order. A
// data-parallel group is one row among workers, which opens on its ranks; where it is the scope, or only some of them are
// in the scope, they are the rows.

import { COLUMNS } from "./columns.js";
import { COVERED } from "./phases.js";
import { drawSpark, SPARK } from "./spark.js";
import { groupScope } from "./store.js";

const MAX_ROWS = 50; // of a table; filter and order bring the others up
const TITLES = { pool: "Pools", model: "Models", node: "Nodes", worker: "Workers" };
const compare = new Intl.Collator("en", { numeric: true }).compare;

export class Tables {
  #tables = new Map();
  #open = new Set(); // groups whose ranks are shown, as scopes

  /** `onScope` gets the scope whose name was clicked, `onOrder` the key of a column. */
  constructor(host, { onScope, onOrder }) {
    for (const kind of Object.keys(TITLES)) this.#tables.set(kind, makeTable(host, kind, onScope, onOrder, (scope) => this.#toggle(scope)));
  }

  #toggle(scope) {
    if (!this.#open.delete(scope)) this.#open.add(scope);
    this.redraw?.();
  }

  /** Figures over `count` windows up to number `last`, of what lies in the scope; `order` is a column, "-" before it upwards. */
  draw(...of) {
    this.redraw = () => this.#draw(...of); // what it is opened on is of the same moment
    this.redraw();
  }

  #draw(store, { depths, offsets, lives }, { scope, filter, order }, last, count) {
    const first = last - count + 1;
    const roles = new Map(), wholes = new Map(); // by slot; how many ranks a group has, in the scope or not
    for (let slot = 0; slot < store.members.length; slot++) {
      const held = store.rolesIn(slot, first, last);
      if (!held.size) continue;
      const group = groupScope(store.members[slot]);
      wholes.set(group, (wholes.get(group) ?? 0) + 1);
      if (store.inScope(slot, scope, first, last)) roles.set(slot, held);
    }
    const names = { pool: new Set(), model: new Set(), node: new Set() }, alone = [], groups = new Map();
    for (const [slot, held] of roles) {
      const member = store.members[slot], group = groupScope(member);
      for (const role of held) names.pool.add(role);
      names.model.add(member.model);
      names.node.add(member.node);
      if (!group || group === scope) alone.push(slot);
      else groups.set(group, [...(groups.get(group) ?? []), slot]);
    }
    for (const [group, slots] of groups) {
      if (slots.length === wholes.get(group)) continue;
      alone.push(...slots);
      groups.delete(group);
    }
    const figures = (of, name, more = {}) => ({
      scope: of,
      name,
      sums: store.total(of, last, count),
      depths: depths?.get(of),
      clock: offsets.get(name),
      role: "",
      node: "",
      spanNs: count * store.windowMs * 1e6,
      ...more,
    });
    const roleOf = (slot) => roles.get(slot).values().next().value;
    const worker = (slot, more) => figures(`worker:${store.members[slot].id}`, store.members[slot].id, { role: roleOf(slot), life: lives?.get(store.members[slot].id), node: store.members[slot].node, ...more });
    for (const [kind, table] of this.#tables) {
      let rows;
      if (kind === "worker") {
        const found = alone.filter((slot) => store.members[slot].id.includes(filter)).map((slot) => worker(slot));
        for (const [group, slots] of groups) {
          const ranks = slots.map((slot) => store.members[slot]).sort((a, b) => compare(a.id, b.id));
          if (![group, ...ranks.map(({ id }) => id)].some((name) => name.includes(filter))) continue;
          const nodes = new Set(ranks.map(({ node }) => node));
          found.push(figures(group, ranks[0].group, { role: roleOf(store.slots.get(ranks[0].id)), node: nodes.size === 1 ? ranks[0].node : `${nodes.size} nodes`, ranks }));
        }
        rows = sort(found, order).flatMap((row) => (this.#open.has(row.scope) ? [{ ...row, open: true }, ...row.ranks.map(({ id }) => worker(store.slots.get(id), { inside: true }))] : [row]));
      } else {
        rows = sort([...names[kind]].filter((name) => name.includes(filter)).map((name) => figures(`${kind}:${name}`, name)), order);
      }
      // One pool, model or node is all there is: its figures are those at the top.
      table.section.hidden = kind !== "worker" && names[kind].size < 2;
      fill(table, kind, rows, order, store, last);
    }
  }
}

function sort(rows, order) {
  const column = COLUMNS.find(({ key }) => key === order.replace("-", ""));
  const sign = order.startsWith("-") ? -1 : 1;
  const byName = (a, b) => compare(a.name, b.name);
  if (!column || column.key === "name") return rows.sort((a, b) => sign * byName(a, b));
  const value = new Map(rows.map((row) => [row, column.value(row) ?? -1]));
  const by = (a, b) => (typeof value.get(a) === "string" ? compare(value.get(a), value.get(b)) : value.get(b) - value.get(a));
  return rows.sort((a, b) => sign * (by(a, b) || 0) || byName(a, b));
}

function makeTable(host, kind, onScope, onOrder, onOpen) {
  const section = host.appendChild(document.createElement("section"));
  section.className = `panel table of-${kind}`;
  const title = section.appendChild(document.createElement("h2"));
  title.textContent = TITLES[kind];
  const count = title.appendChild(document.createElement("small"));
  const table = section.appendChild(document.createElement("div")).appendChild(document.createElement("table"));
  table.setAttribute("aria-label", TITLES[kind]);
  const columns = COLUMNS.filter(({ of }) => !of || of.includes(kind));
  const head = table.createTHead().insertRow();
  const heads = columns.map(({ key, head: text, tip, value }) => {
    const cell = head.appendChild(document.createElement("th"));
    [cell.scope, cell.className, cell.title] = ["col", `c-${key}`, tip ?? ""];
    if (!value) cell.textContent = text;
    else {
      const button = cell.appendChild(document.createElement("button"));
      button.textContent = text || kind;
      button.addEventListener("click", () => onOrder(key));
    }
    return cell;
  });
  const body = table.createTBody();
  body.addEventListener("click", (event) => {
    if (event.target.dataset.scope) onScope(event.target.dataset.scope);
    if (event.target.dataset.ranks) onOpen(event.target.dataset.ranks);
  });
  return { section, body, count, columns, heads, rows: new Map() };
}

function fill(table, kind, all, order, store, last) {
  const rows = all.slice(0, MAX_ROWS);
  setText(table.count, all.length > MAX_ROWS ? `the first ${MAX_ROWS} of ${all.length}: filter or order to see others` : `${all.length}`);
  for (const [index, { key }] of table.columns.entries()) {
    const direction = key === order ? "descending" : `-${key}` === order ? "ascending" : "none";
    if (table.heads[index].ariaSort !== direction) table.heads[index].ariaSort = direction;
  }
  const shown = new Set(rows.map((row) => row.scope));
  for (const [scope, row] of table.rows) {
    if (shown.has(scope)) continue;
    row.element.remove();
    table.rows.delete(scope);
  }
  for (const [index, figures] of rows.entries()) {
    const { scope } = figures;
    let row = table.rows.get(scope);
    if (!row) table.rows.set(scope, (row = makeRow(table, figures)));
    if (table.body.rows[index] !== row.element) moveTo(table.body, row.element, table.body.rows[index] ?? null);
    for (const [place, { text }] of table.columns.entries()) if (text) setText(row.element.cells[place], text(figures));
    row.element.classList.toggle("inside", Boolean(figures.inside));
    if (row.ranks) {
      row.ranks.ariaExpanded = Boolean(figures.open);
      setText(row.ranks, `${figures.open ? "▾" : "▸"} ${figures.ranks.length} ranks`);
    }
    row.element.classList.toggle("uncovered", !figures.sums[COVERED]);
    drawSpark(row.spark, store, store.series(scope), last);
  }
}

function makeRow(table, { name, scope, ranks: those }) {
  const element = document.createElement("tr");
  let spark, ranks;
  for (const { key } of table.columns) {
    const cell = element.appendChild(document.createElement(key === "name" ? "th" : "td"));
    cell.className = `c-${key}`;
    if (key === "name") {
      cell.scope = "row";
      const button = cell.appendChild(document.createElement("button"));
      button.textContent = button.title = name;
      button.dataset.scope = scope;
      if (!those) continue;
      ranks = cell.appendChild(document.createElement("button"));
      ranks.className = "ranks";
      ranks.dataset.ranks = scope;
    } else if (key === "trend") {
      spark = cell.appendChild(document.createElement("canvas"));
      [spark.width, spark.height] = [SPARK.width, SPARK.height];
    }
  }
  return { element, spark, ranks };
}

/** Before another row; the focus stays where it is. */
function moveTo(body, row, before) {
  const focused = row.contains(document.activeElement) ? document.activeElement : null;
  body.insertBefore(row, before);
  focused?.focus({ preventScroll: true });
}

function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}
