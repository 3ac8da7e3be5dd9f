// Windows of every worker in typed arrays, the oldest overwritten by the newest, and their sums by group.

import { COVERED, DECODE, ENCODE, FIELDS, GPU_NS, KV_WAIT, PREFILL, PROVISIONAL_BIT, PROVISIONAL_NS, ROLES } from "./phases.js";

const FIRST_SLOTS = 16;
const MAX_SLOTS = 4096;

/** Sums of a group, window by window. */
class Group {
  constructor(columns) {
    this.values = new Float64Array(columns * FIELDS);
    this.workers = 0;
  }
  value(column, field) {
    return this.values[column * FIELDS + field];
  }
}

export class Store {
  constructor(windowMs, columns) {
    this.windowMs = windowMs;
    this.columns = columns;
    this.newest = -1; // number of the newest window: its start over windowMs
    this.members = []; // by slot: {id, node, model, gpus, engine, group}
    this.slots = new Map();
    this.groups = new Map(); // "cluster", "node:a", "pool:decode", ... -> Group
    this.writes = 0; // of windows, new or revised
    this.stamps = new Float64Array(columns); // by column: the write that was its last
    this.loads = 0; // grows when many were
    this.lengthsMs = new Float64Array(columns).fill(windowMs); // by column: how much of the window is over
    this.dirty = new Set(); // columns whose sums are to be made again
    this.encode = null; // of [column, slot], as times are; none until a worker encodes images
    this.#allocate(FIRST_SLOTS);
    this.numbers = new Float64Array(columns).fill(-1);
  }

  #allocate(size) {
    const times = this.windowMs < 4000 ? new Uint32Array(this.columns * size * 4) : new Float64Array(this.columns * size * 4);
    const roles = new Uint8Array(this.columns * size);
    for (let column = 0; this.size && column < this.columns; column++) {
      times.set(this.times.subarray(column * this.size * 4, (column + 1) * this.size * 4), column * size * 4);
      roles.set(this.roles.subarray(column * this.size, (column + 1) * this.size), column * size);
    }
    const encode = this.encode && new times.constructor(this.columns * size);
    for (let column = 0; encode && column < this.columns; column++) encode.set(this.encode.subarray(column * this.size, (column + 1) * this.size), column * size);
    [this.times, this.roles, this.encode, this.size] = [times, roles, encode, size];
  }

  /** The slot of a worker, a new one for one that is new; -1 when there are too many. */
  slot(member) {
    let slot = this.slots.get(member.id);
    if (slot === undefined) {
      slot = this.members.length;
      if (slot >= MAX_SLOTS) return -1;
      if (slot === this.size) this.#allocate(2 * this.size);
      this.slots.set(member.id, slot);
      this.members.push(member);
      this.#group("cluster").workers++;
      this.#group(`node:${member.node}`).workers++;
      this.#group(`model:${member.model}`).workers++;
      if (member.group) this.#group(groupScope(member)).workers++;
    } else if (["node", "model", "gpus", "group"].some((name) => this.members[slot][name] !== member[name])) {
      this.members[slot] = member;
      for (let column = 0; column < this.columns; column++) this.dirty.add(column);
    } else {
      this.members[slot] = member;
    }
    return slot;
  }

  #group(name) {
    let group = this.groups.get(name);
    if (!group) this.groups.set(name, (group = new Group(this.columns)));
    return group;
  }

  /** Where a window is kept, emptied if it is new; -1 for one that is too old. `lengthMs` of it are over. */
  column(number, lengthMs = this.windowMs) {
    if (number <= this.newest - this.columns) return -1;
    this.newest = Math.max(number, this.newest);
    const column = number % this.columns;
    this.stamps[column] = ++this.writes;
    this.lengthsMs[column] = lengthMs;
    if (this.numbers[column] !== number) {
      this.numbers[column] = number;
      this.times.fill(0, column * this.size * 4, (column + 1) * this.size * 4);
      this.roles.fill(0, column * this.size, (column + 1) * this.size);
      this.encode?.fill(0, column * this.size, (column + 1) * this.size);
    }
    this.dirty.add(column);
    return column;
  }

  put(column, slot, covered, prefill, decode, kvWait, role, encode = 0) {
    const at = (column * this.size + slot) * 4;
    this.times[at] = covered;
    this.times[at + 1] = prefill;
    this.times[at + 2] = decode;
    this.times[at + 3] = kvWait;
    this.roles[column * this.size + slot] = role;
    if (encode) this.encode ??= new this.times.constructor(this.columns * this.size);
    if (this.encode) this.encode[column * this.size + slot] = encode;
  }

  /** Whether the window is held. */
  has(number) {
    return number >= 0 && this.numbers[number % this.columns] === number;
  }

  /** Hold nothing from a window on. */
  drop(number) {
    for (let column = 0; column < this.columns; column++) if (this.numbers[column] >= number) this.numbers[column] = -1;
    this.newest = this.numbers.reduce((newest, held) => Math.max(newest, held), -1);
  }

  /** Columns that were written after write number `seen`. */
  writtenAfter(seen) {
    const columns = [];
    for (let column = 0; seen < this.writes && column < this.columns; column++) if (this.stamps[column] > seen) columns.push(column);
    return columns;
  }

  /** Make sums of what was written since the last call. */
  settle() {
    for (const column of this.dirty) this.#sum(column);
    this.dirty.clear();
  }

  #sum(column) {
    const begin = column * FIELDS;
    for (const group of this.groups.values()) group.values.fill(0, begin, begin + FIELDS);
    const pools = ROLES.map((role) => role && this.#group(`pool:${role}`));
    const cluster = this.#group("cluster");
    for (let slot = 0; slot < this.members.length; slot++) {
      const role = this.roles[column * this.size + slot];
      if (!role) continue;
      const { node, model, gpus } = this.members[slot];
      const at = (column * this.size + slot) * 4;
      const sums = [cluster, pools[role & 127], this.groups.get(`node:${node}`) ?? this.#group(`node:${node}`), this.groups.get(`model:${model}`) ?? this.#group(`model:${model}`)];
      if (this.members[slot].group) sums.push(this.#group(groupScope(this.members[slot])));
      for (const group of sums) {
        const values = group.values;
        values[begin + COVERED] += this.times[at] * gpus;
        values[begin + PREFILL] += this.times[at + 1] * gpus;
        values[begin + DECODE] += this.times[at + 2] * gpus;
        values[begin + KV_WAIT] += this.times[at + 3] * gpus;
        if (this.encode) values[begin + ENCODE] += this.encode[column * this.size + slot] * gpus;
        values[begin + GPU_NS] += this.lengthsMs[column] * 1e6 * gpus;
        if (role & PROVISIONAL_BIT) values[begin + PROVISIONAL_NS] += this.times[at] * gpus;
      }
    }
  }

  /** Something with `value(column, field)` for a scope; undefined for one that is not known. */
  series(scope) {
    if (!scope.startsWith("worker:")) return this.groups.get(scope);
    const slot = this.slots.get(scope.slice(7));
    if (slot === undefined) return undefined;
    return { value: (column, field) => this.#workerValue(column, slot, field) };
  }

  #workerValue(column, slot, field) {
    const gpus = this.members[slot].gpus;
    const role = this.roles[column * this.size + slot];
    if (field === GPU_NS) return role ? this.lengthsMs[column] * 1e6 * gpus : 0;
    if (field === ENCODE) return this.encode ? this.encode[column * this.size + slot] * gpus : 0;
    const at = (column * this.size + slot) * 4;
    if (field === PROVISIONAL_NS) return role & PROVISIONAL_BIT ? this.times[at] * gpus : 0;
    return this.times[at + field] * gpus;
  }

  /** Sums of a scope over `count` windows up to and with number `last`. */
  total(scope, last, count) {
    const sums = new Array(FIELDS).fill(0);
    const series = this.series(scope);
    for (let number = last - count + 1; series && number <= last; number++) {
      if (!this.has(number)) continue;
      for (let field = 0; field < FIELDS; field++) sums[field] += series.value(number % this.columns, field);
    }
    return sums;
  }

  /** The role that a worker had last in windows `first` to `last`; empty where it was neither heard of nor missed. */
  roleIn(slot, first, last) {
    for (let number = Math.min(last, this.newest); number >= Math.max(first, 0); number--) {
      const role = this.has(number) ? this.roles[(number % this.columns) * this.size + slot] & 127 : 0;
      if (role) return ROLES[role];
    }
    return "";
  }

  /** All roles that it had in them. */
  rolesIn(slot, first, last) {
    const found = new Set();
    for (let number = Math.min(last, this.newest); number >= Math.max(first, 0); number--) {
      const role = this.has(number) ? this.roles[(number % this.columns) * this.size + slot] & 127 : 0;
      if (role) found.add(ROLES[role]);
    }
    return found;
  }

  /** Whether a worker counts for a scope in windows `first` to `last`. */
  inScope(slot, scope, first, last) {
    const [kind, name] = splitScope(scope);
    if (kind === "cluster") return true;
    if (kind === "pool") return this.rolesIn(slot, first, last).has(name);
    if (kind === "group") return groupScope(this.members[slot]) === scope;
    return this.members[slot][{ node: "node", model: "model", worker: "id" }[kind]] === name;
  }
}

/** The scope of the data-parallel group that a worker is a rank of; undefined for one of none. */
export function groupScope({ model, group }) {
  return group ? `group:${model}/${group}` : undefined;
}

/** "node:a:b" as ["node", "a:b"]. */
export function splitScope(scope) {
  const at = scope.indexOf(":");
  return at < 0 ? [scope, ""] : [scope.slice(0, at), scope.slice(at + 1)];
}
