// Polls the status every two seconds and shows it. Shows a notice if the server does not answer.

import { byId, element, setAttribute, setText, show } from "./dom.js";
import { age, count, percent, rate, size } from "./format.js";
import { CurvePlot, spark, split } from "./plot.js";
import { Tables } from "./tables.js";

const EVERY_MS = 2000;
const HIDDEN_MS = 30000;
const TIMEOUT_MS = 5000;
const RECENT_MS = 60000;
const THROUGHPUT_MS = 10000;
const SLOW_LOOP_SECONDS = 1;
const KEPT_MS = 300000;

const tables = new Tables();
const curve = new CurvePlot(byId("plot"), byId("curve-table"));
let token = "";
let paused = false;
let timer = 0;
let epoch = "";
let lastAnswer = null;
let since = null;
let past = [];
let news = [];

const clock = (date) => date.toLocaleTimeString([], { hourCycle: "h23" });
const sum = (values) => values.reduce((total, value) => total + value, 0);

// Shows one line per text.
const notify = (texts, kind) => {
  const notice = byId("notice");
  while (notice.children.length > texts.length) notice.lastChild.remove();
  while (notice.children.length < texts.length) notice.append(element("p"));
  texts.forEach((text, number) => setText(notice.children[number], text));
  setAttribute(notice, "data-kind", kind);
  show(notice, texts.length > 0);
};

const state = (text, kind) => {
  setText(byId("state"), text);
  setAttribute(byId("state"), "data-state", kind);
};

// Keys per second and hit rate between two samples.
const between = (one, other) => {
  const seconds = (other.at - one.at) / 1000;
  const keys = other.keys - one.keys;
  return { keys: keys / seconds, ratio: keys ? (other.hits - one.hits) / keys : null };
};

const showRates = (status) => {
  const hits = sum(status.tiers.map((tier) => tier.hits));
  const now = { at: performance.now(), leases: status.leases, keys: status.lookup_keys, hits, tiers: status.tiers };
  past = [...past.filter((sample) => now.at - sample.at <= KEPT_MS), now];
  const recent = past.filter((sample) => now.at - sample.at <= RECENT_MS);
  const span = recent.length > 1 ? between(recent[0], now) : null;
  const seconds = Math.round((now.at - recent[0].at) / 1000);
  setText(byId("recent-rate"), percent(span?.ratio));
  setText(byId("recent-sub"), seconds >= 55 || !span ? "of the keys looked up" : `of the keys looked up in ${seconds} s`);
  setText(byId("key-rate"), span ? rate(span.keys) : "–");
  setText(byId("key-sub"), now.keys ? `${count(now.keys)} since start` : "none since start");
  const steps = past.slice(1).map((sample, number) => between(past[number], sample));
  spark(byId("rate-line"), steps.filter((step) => step.ratio !== null).map((step) => step.ratio), 1);
  spark(byId("keys-line"), steps.map((step) => step.keys), Math.max(...steps.map((step) => step.keys), 1));
  spark(byId("leases-line"), past.map((sample) => sample.leases), Math.max(...past.map((sample) => sample.leases), 1));
  setText(byId("total-rate"), percent(now.keys ? now.hits / now.keys : null));
  setAttribute(byId("total-rate"), "data-value", String(now.keys ? now.hits / now.keys : 0));
  setText(byId("total-sub"), now.keys ? status.tiers.map((tier) => `${tier.name} ${percent(tier.hits / now.keys)}`).join(", ") : "of no keys");
  split(byId("share-line"), now.keys ? status.tiers.map((tier) => tier.hits / now.keys) : []);
};

// Adds the throughput of the last seconds, and the blocks dropped in the last minute, to each tier.
const withRates = (status) => {
  const now = past.at(-1);
  // A hidden page asks less often than the span: then the last two samples count.
  const first = (span) => past.slice(0, -1).find((sample) => now.at - sample.at <= span) ?? past.at(-2) ?? now;
  const [recent, minute] = [first(THROUGHPUT_MS), first(RECENT_MS)];
  const seconds = (now.at - recent.at) / 1000;
  const tiers = status.tiers.map((tier, place) => {
    const since = (name) => (seconds ? (tier[name] - recent.tiers[place][name]) / seconds : null);
    const dropped = tier.dropped_blocks - minute.tiers[place].dropped_blocks;
    return { ...tier, stored_per_s: since("stored_bytes"), loaded_per_s: since("loaded_bytes"), dropped };
  });
  return { ...status, tiers };
};

const showCurve = (status) => {
  const known = status.tiers.map((tier, number) => ({ ...tier, number })).filter((tier) => tier.estimates.length > 0);
  show(byId("curve"), known.length > 0);
  show(byId("curve-none"), known.length === 0);
  if (known.length) curve.update(known);
};

const showState = (status) => {
  const inTrouble = status.tiers.filter((tier) => !tier.healthy);
  const troubles = inTrouble.map((tier) => `Tier ${tier.name} is in trouble: ${tier.trouble || "no reason is known"}`);
  if (status.draining) troubles.push("This server is draining: it refuses new work, and ends when running work is done.");
  for (const tier of status.tiers) {
    if (tier.dropped) troubles.push(`Tier ${tier.name} did not store ${count(tier.dropped)} blocks in the last minute, because it or its queue was full.`);
  }
  if (status.loop_lag_seconds >= SLOW_LOOP_SECONDS) {
    troubles.push(`The server answered no call for ${status.loop_lag_seconds.toFixed(1)} s in the last seconds.`);
  }
  if (status.draining) state("draining", "warn");
  else if (inTrouble.length) state("in trouble", "bad");
  else state("serving", "ok");
  notify([...troubles, ...news], inTrouble.length ? "bad" : troubles.length ? "warn" : "info");
};

const render = (status) => {
  if (epoch && epoch !== status.epoch) {
    news = [`The server was restarted at about ${clock(new Date(Date.now() - status.uptime_seconds * 1000))}: its counts are reset.`];
    past = [];
    setTimeout(() => { news = []; }, 30000);
  }
  epoch = status.epoch;
  lastAnswer = new Date();
  since = null;
  document.body.classList.remove("stale");
  show(byId("figures"), true);
  setText(byId("version"), status.server_version);
  setText(byId("epoch"), status.epoch);
  setText(byId("uptime"), age(status.uptime_seconds));
  setText(byId("asof"), clock(lastAnswer));
  setText(byId("leases"), count(status.leases));
  setText(byId("leases-unit"), status.leases === 1 ? " lease" : " leases");
  setText(byId("stores"), count(status.stores));
  setText(byId("holds"), status.held_bytes ? `${count(status.holds)} (${size(status.held_bytes)})` : count(status.holds));
  setText(byId("quarantine"), `${size(status.quarantined_bytes)} in quarantine`);
  show(byId("quarantine"), status.quarantined_bytes > 0);
  showRates(status);
  const rated = withRates(status);
  tables.update(rated);
  showCurve(status);
  showState(rated);
  show(byId("token"), false);
};

const unreachable = (why) => {
  since ??= new Date();
  document.body.classList.add("stale");
  state("no answer", "bad");
  const kept = lastAnswer ? ` The figures below are from ${clock(lastAnswer)}.` : "";
  notify([`${why} since ${clock(since)}.${kept} The page keeps trying.`], "bad");
};

const refused = () => {
  state("locked", "warn");
  notify(token ? ["This token does not allow viewing the figures."] : [], "warn");
  token = "";
  const form = byId("token");
  if (form.hidden) {
    show(form, true);
    byId("token-text").focus();
  }
};

const ask = async () => {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  try {
    const answer = await fetch("status.json", { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.status === 401) return refused();
    const body = await answer.json();
    if (!answer.ok) return unreachable(`The server does not answer (${body.error ?? answer.status})`);
    return render(body);
  } catch (error) {
    return unreachable(error.name === "TimeoutError" ? "The server does not answer" : "No answer from the server");
  }
};

const locked = () => !byId("token").hidden;

const turn = async () => {
  clearTimeout(timer);
  if (!locked()) await ask();
  clearTimeout(timer);
  if (!paused && !locked()) timer = setTimeout(turn, document.hidden ? HIDDEN_MS : EVERY_MS);
};

byId("pause").addEventListener("click", () => {
  paused = !paused;
  setAttribute(byId("pause"), "aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Resume" : "Pause");
  if (paused) clearTimeout(timer);
  else turn();
});

byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token-text").value;
  byId("token-text").value = "";
  show(byId("token"), false);
  turn();
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) turn();
});

setText(byId("host"), location.host);
document.title = `kvtier ${location.host}`;
turn();
