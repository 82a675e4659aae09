// Tables of the page and their columns.

import { bar, byId, element, KeyedTable, setAttribute, setText, show } from "./dom.js";
import { age, count, percent, size, throughput, words } from "./format.js";
import { color } from "./plot.js";

const WHY = {
  never_stored: "not stored by any engine, as far as is recorded",
  evicted: "evicted to free space",
  store_failed: "offered, but writing failed",
  policy: "excluded by a rule",
  below_threshold: "the prefix found was below the minimum length",
  format_mismatch: "present in another format",
  expired: "not used for the tier's time to live",
  load_failed: "a tier could not load them",
  no_room: "in a tier, but every slot of the CPU tier was in use",
  reset: "removed by a reset of the CPU tier",
  pending: "not loaded before the wait ended",
  damaged: "removed, because the bytes in memory did not match their digest",
};

const number = (name, label, value) => ({ name, label, num: true, text: (row) => count(value(row)), raw: value });
const plain = (name, label, text, more = {}) => ({ name, label, text, ...more });

// A column with a name and a note below the name.
const named = (name, label, text, note, key) => ({
  name,
  label,
  head: true,
  make: (cell, row) => {
    const [first, second] = [element("span"), element("span", { class: "note" })];
    if (key) cell.append(element("span", { class: `key ${color(row.number)}`, "aria-hidden": "true" }));
    cell.append(first, second);
    return (it) => {
      setText(first, text(it));
      setText(second, note(it));
      show(second, note(it) !== "");
    };
  },
});

// A column of numbers with a note below.
const noted = (name, label, text, note, value) => ({
  name,
  label,
  num: true,
  make: (cell) => {
    const [first, second] = [element("span"), element("span", { class: "note" })];
    cell.append(first, second);
    return (it) => {
      setText(first, text(it));
      setText(second, note(it));
    };
  },
  raw: value,
});

const tierColumns = [
  named("tier", "tier", (it) => it.name, (it) => (it.type === it.name ? "" : it.type), true),
  {
    name: "health",
    label: "health",
    make: (cell) => {
      const pill = element("span", { class: "pill" });
      cell.append(pill);
      return (it) => {
        setText(pill, it.healthy ? "ok" : "trouble");
        setAttribute(pill, "data-state", it.healthy ? "ok" : "bad");
      };
    },
    raw: (it) => it.healthy,
  },
  {
    name: "fill",
    label: "fill",
    wide: true,
    make: (cell, row) => {
      const update = bar(cell, color(row.number));
      const words = (it) => `${size(it.used_bytes)} of ${size(it.capacity_bytes)}, ${percent(it.fill)}`;
      const ready = (it) => (it.available_bytes < it.capacity_bytes ? ` (${size(it.available_bytes)} ready)` : "");
      return (it) => update(it.fill, words(it) + ready(it));
    },
    raw: (it) => it.used_bytes,
  },
  noted("hits", "hit rate", (it) => percent(it.hit_rate), (it) => `${count(it.hits)} hits`, (it) => it.hits),
  noted("stored", "stored", (it) => throughput(it.stored_per_s), (it) => `${size(it.stored_bytes)} total`, (it) => it.stored_bytes),
  noted("loaded", "loaded", (it) => throughput(it.loaded_per_s), (it) => `${size(it.loaded_bytes)} total`, (it) => it.loaded_bytes),
  noted("jobs", "jobs queued", (it) => count(it.jobs), (it) => (it.queued_bytes ? size(it.queued_bytes) : ""), (it) => it.jobs),
  noted("blocks", "blocks", (it) => count(it.blocks), (it) => `${count(it.evictions)} evicted`, (it) => it.blocks),
  {
    name: "damaged",
    label: "damaged",
    num: true,
    make: (cell) => (it) => {
      setText(cell, count(it.damaged_blocks));
      cell.classList.toggle("bad-text", it.damaged_blocks > 0);
    },
    raw: (it) => it.damaged_blocks,
  },
  {
    name: "disk_free",
    label: "disk free",
    num: true,
    text: (it) => (it.free_disk_bytes === null ? "–" : size(it.free_disk_bytes)),
    raw: (it) => it.free_disk_bytes,
  },
];

const missColumns = [
  named("reason", "reason", (it) => words(it.reason), (it) => WHY[it.reason] ?? ""),
  number("keys", "keys", (it) => it.keys),
  {
    name: "share",
    label: "share",
    make: (cell) => {
      const update = bar(cell);
      return (it) => update(it.share, percent(it.share));
    },
  },
];

const sessionColumns = [
  named("engine", "engine", (it) => it.engine_id, (it) => (it.client_name === it.engine_id ? "" : it.client_name)),
  plain("rank", "rank", (it) => (it.rank === null ? "scheduler" : `${it.rank}${it.world_size > 1 ? ` of ${it.world_size}` : ""}`)),
  plain("tenant", "tenant", (it) => it.tenant || "–"),
  plain("transport", "transport", (it) => it.transport),
  {
    name: "model",
    label: "model, and hash of the namespace",
    wide: true,
    make: (cell) => {
      const [model, hash] = [element("span"), element("span", { class: "note mono" })];
      cell.append(model, hash);
      return (it) => {
        setText(model, it.model || "–");
        setText(hash, it.namespace_id);
      };
    },
  },
  plain("attached", "region", (it) => (it.attached ? "mapped" : "–")),
  { name: "age", label: "age", num: true, text: (it) => age(it.age_seconds), raw: (it) => it.age_seconds },
  number("leases", "leases", (it) => it.leases),
];

const handoffColumns = [
  named("direction", "direction", (it) => words(it.direction), () => ""),
  number("open", "held now", (it) => it.open),
  number("published", "published", (it) => it.published),
  number("declined", "declined", (it) => it.declined),
  number("claimed", "claims", (it) => it.claimed),
  { name: "claimed_bytes", label: "bytes claimed", num: true, text: (it) => size(it.claimed_bytes), raw: (it) => it.claimed_bytes },
  number("released", "released", (it) => it.released),
  number("expired", "expired", (it) => it.expired),
  number("dropped", "dropped", (it) => it.dropped),
];

const downgradeColumns = [
  named("feature", "feature", (it) => words(it.feature), () => ""),
  plain("cause", "cause", (it) => it.cause, { wide: true }),
  plain("remedy", "remedy", (it) => it.remedy || "–", { wide: true }),
];

const tenantColumns = [
  named("tenant", "tenant", (it) => it.tenant || "all others", () => ""),
  plain("tier", "tier", (it) => it.tier),
  {
    name: "used",
    label: "used",
    wide: true,
    make: (cell, row) => {
      const update = bar(cell, color(row.number));
      return (it) => update(it.used_bytes / it.capacity_bytes || 0, `${size(it.used_bytes)}, ${percent(it.used_bytes / it.capacity_bytes || 0)} of the tier`);
    },
    raw: (it) => it.used_bytes,
  },
  plain("quota", "quota", (it) => (it.quota_bytes ? size(it.quota_bytes) : "–"), { num: true }),
  plain("limit", "limit", (it) => (it.limit_bytes === null ? "–" : size(it.limit_bytes)), { num: true }),
  plain("retained", "retained", (it) => size(it.retained_bytes), { num: true }),
];

export class Tables {
  constructor() {
    this.tiers = new KeyedTable(byId("tiers"), "Tiers in lookup order", tierColumns);
    this.misses = new KeyedTable(byId("misses"), "Missed keys by reason, since start", missColumns);
    this.sessions = new KeyedTable(byId("sessions"), "Open sessions", sessionColumns);
    this.handoffs = new KeyedTable(byId("handoffs"), "Requests handed over between engines, since start", handoffColumns);
    this.downgrades = new KeyedTable(byId("downgrades"), "Current downgrades, oldest first", downgradeColumns);
    this.tenants = new KeyedTable(byId("tenants"), "Usage of each tier by tenant", tenantColumns);
  }

  update(status) {
    this.tiers.update(status.tiers.map((tier, place) => ({ ...tier, key: tier.name, number: place })));
    this.downgrades.update(status.downgrades.map((it) => ({ ...it, key: `${it.feature}/${it.cause}` })));
    setText(byId("downgrade-count"), count(status.downgrades.length));
    show(byId("downgrades-panel"), status.downgrades.length > 0);
    const missed = status.misses.reduce((sum, miss) => sum + miss.keys, 0);
    this.misses.update(status.misses.map((miss) => ({ ...miss, key: miss.reason, share: miss.keys / missed })));
    show(byId("misses-none"), missed === 0);
    const seen = new Map();
    const sessions = status.sessions.map((session) => {
      const name = `${session.engine_id}/${session.rank}/${session.client_name}/${session.pid}`;
      seen.set(name, (seen.get(name) ?? 0) + 1);
      return { ...session, key: `${name}/${seen.get(name)}` };
    });
    this.sessions.update(sessions);
    setText(byId("session-count"), count(sessions.length));
    show(byId("sessions-none"), sessions.length === 0);
    const handed = status.handoffs.filter((totals) => totals.published || totals.declined || totals.open);
    this.handoffs.update(handed.map((totals) => ({ ...totals, key: totals.direction })));
    show(byId("handoffs-none"), handed.length === 0);
    const shares = status.tiers.flatMap((tier, place) => tier.shares.map((share) => (
      { ...share, tier: tier.name, capacity_bytes: tier.capacity_bytes, number: place }
    )));
    show(byId("tenants-panel"), shares.some((share) => share.tenant !== ""));
    this.tenants.update(shares.map((share) => ({ ...share, key: `${share.tenant}/${share.tier}` })));
  }
}
