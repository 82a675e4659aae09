// Tables of the page and their columns.

import { bar, byId, element, KeyedTable, setAttribute, setText, show } from "./dom.js";
import { age, count, percent, size, words } from "./format.js";
import { color } from "./plot.js";

const WHY = {
  never_stored: "not stored by any engine, as far as is recorded",
  evicted: "evicted to free space",
  store_failed: "offered, but writing failed",
  policy: "excluded by a rule",
  below_threshold: "the prefix found was below the minimum length",
  format_mismatch: "present in another format",
  expired: "expired",
  load_failed: "a tier could not load them",
  no_room: "in a tier, but every slot of the CPU tier was in use",
  reset: "removed by a reset of the CPU tier",
  pending: "not loaded before the wait ended",
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

const tierColumns = [
  named("tier", "tier", (it) => it.name, (it) => (it.type === it.name ? "" : it.type), true),
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
  number("blocks", "blocks", (it) => it.blocks),
  { name: "hit_rate", label: "hit rate", num: true, text: (it) => percent(it.hit_rate), raw: (it) => it.hit_rate },
  number("hits", "hits", (it) => it.hits),
  number("evictions", "evicted", (it) => it.evictions),
  number("damaged", "damaged", (it) => it.damaged_blocks),
  {
    name: "jobs",
    label: "jobs queued",
    num: true,
    text: (it) => (it.queued_bytes ? `${count(it.jobs)} (${size(it.queued_bytes)})` : count(it.jobs)),
    raw: (it) => it.jobs,
  },
  {
    name: "health",
    label: "health",
    wide: true,
    make: (cell) => {
      const [pill, why] = [element("span", { class: "pill" }), element("span", { class: "note bad-text" })];
      cell.append(pill, why);
      return (it) => {
        setText(pill, it.healthy ? "ok" : "degraded");
        setAttribute(pill, "data-state", it.healthy ? "ok" : "bad");
        setText(why, it.trouble);
        show(why, it.trouble !== "");
      };
    },
    raw: (it) => it.healthy,
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
  plain("transport", "transport", (it) => it.transport),
  plain("model", "model", (it) => it.model || "–"),
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
  { name: "claimed_bytes", label: "claimed", num: true, text: (it) => size(it.claimed_bytes), raw: (it) => it.claimed_bytes },
  number("released", "released", (it) => it.released),
  number("expired", "expired", (it) => it.expired),
  number("dropped", "dropped", (it) => it.dropped),
];

const tenantColumns = [
  named("tenant", "tenant", (it) => it.tenant || "all others", (it) => it.tier),
  { name: "used", label: "used", num: true, text: (it) => size(it.used_bytes), raw: (it) => it.used_bytes },
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
    this.tenants = new KeyedTable(byId("tenants"), "Usage of each tier by tenant", tenantColumns);
  }

  update(status) {
    this.tiers.update(status.tiers.map((tier, place) => ({ ...tier, key: tier.name, number: place })));
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
    const shares = status.tiers.flatMap((tier) => tier.shares.map((share) => ({ ...share, tier: tier.name })));
    show(byId("tenants-panel"), shares.some((share) => share.tenant !== ""));
    this.tenants.update(shares.map((share) => ({ ...share, key: `${share.tenant}/${share.tier}` })));
  }
}
