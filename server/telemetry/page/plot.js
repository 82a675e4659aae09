// Plot of the estimated hit rate at other tier sizes, and sparklines.

import { element, setAttribute, shape } from "./dom.js";
import { percent } from "./format.js";

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [270, 44, 74, 14, 34];
const NARROWEST = 280;
const COLORS = 6;
const GAP = 15;

export const color = (number) => `c${number % COLORS}`;
export const times = (scale) => (scale === 0.5 ? "½×" : `${scale}×`);

const log = Math.log2;

// Moves apart labels at the ends of lines that would overlap.
const spread = (ends) => {
  const sorted = [...ends].sort((one, other) => one.y - other.y);
  sorted.forEach((end, number) => {
    end.at = number ? Math.max(end.y, sorted[number - 1].at + GAP) : end.y;
  });
  const over = sorted.length ? sorted.at(-1).at - (HEIGHT - BOTTOM) : 0;
  for (const end of sorted) end.at -= Math.max(0, over);
};

export class CurvePlot {
  constructor(plot, place) {
    this.plot = plot;
    this.place = place;
    this.drawn = "";
    this.tiers = [];
    // Drawn at the real width, because scaling the plot would scale its text.
    new ResizeObserver(() => this.update(this.tiers)).observe(plot.parentElement);
  }

  // Redraws only after a visible change, of at least 0.1 percent.
  update(tiers) {
    this.tiers = tiers;
    const width = Math.max(NARROWEST, this.plot.parentElement.clientWidth);
    if (!tiers.length) return;
    const figures = tiers.map((tier) => [tier.name, tier.estimates.map((it) => [it.scale, percent(it.hit_rate)])]);
    const seen = JSON.stringify([width, figures]);
    if (seen === this.drawn) return;
    this.drawn = seen;
    setAttribute(this.plot, "viewBox", `0 0 ${width} ${HEIGHT}`);
    const scales = tiers[0].estimates.map((it) => it.scale);
    const [first, last] = [log(scales[0]), log(scales.at(-1))];
    const x = (scale) => LEFT + ((log(scale) - first) / (last - first)) * (width - LEFT - RIGHT);
    const y = (ratio) => HEIGHT - BOTTOM - ratio * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const ratio of [0, 0.25, 0.5, 0.75, 1]) {
      parts.push(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(ratio), y2: y(ratio) }));
      parts.push(shape("text", { x: LEFT - 8, y: y(ratio) + 4, "text-anchor": "end" }, `${ratio * 100}%`));
    }
    parts.push(shape("line", { class: "now", x1: x(1), x2: x(1), y1: TOP, y2: HEIGHT - BOTTOM }));
    for (const scale of scales) {
      const text = scale === 1 ? "1× now" : times(scale);
      parts.push(shape("text", { x: x(scale), y: HEIGHT - BOTTOM + 20, "text-anchor": "middle" }, text));
    }
    const ends = tiers.map((tier) => ({ y: y(tier.estimates.at(-1).hit_rate) }));
    spread(ends);
    tiers.forEach((tier, number) => {
      const points = tier.estimates.map((it) => `${x(it.scale)} ${y(it.hit_rate)}`);
      parts.push(shape("path", { class: color(tier.number), d: `M${points.join("L")}`, "data-tier": tier.name }));
      for (const it of tier.estimates) {
        const own = it.scale === 1 ? " own" : "";
        const dot = shape("circle", { class: color(tier.number) + own, cx: x(it.scale), cy: y(it.hit_rate), r: own ? 5 : 4.5 });
        dot.append(shape("title", {}, `${tier.name} at ${times(it.scale)}: ${percent(it.hit_rate)}`));
        parts.push(dot);
      }
      const name = tier.name.length > 9 ? `${tier.name.slice(0, 8)}…` : tier.name;
      parts.push(shape("text", { class: `name ${color(tier.number)}`, x: width - RIGHT + 12, y: ends[number].at + 4 }, name));
    });
    this.plot.replaceChildren(...parts);
    this.#table(tiers, scales);
  }

  #table(tiers, scales) {
    const head = element("tr", {}, element("th", { scope: "col" }, "tier"));
    for (const scale of scales) head.append(element("th", { scope: "col", class: "num" }, times(scale)));
    const body = element("tbody");
    for (const tier of tiers) {
      const key = element("span", { class: `key ${color(tier.number)}`, "aria-hidden": "true" });
      const line = element("tr", { "data-key": tier.name }, element("th", { scope: "row" }, key, tier.name));
      for (const it of tier.estimates) {
        line.append(element("td", { class: "num", "data-scale": it.scale, "data-value": it.hit_rate }, percent(it.hit_rate)));
      }
      body.append(line);
    }
    const caption = element("caption", {}, "Estimated hit rate at other sizes of each tier");
    this.place.replaceChildren(element("table", {}, caption, element("thead", {}, head), body));
  }
}

// A sparkline: values over time, without axes and labels.
export const spark = (svg, values, most) => {
  if (values.length < 2) {
    svg.replaceChildren();
    return;
  }
  setAttribute(svg, "viewBox", "0 0 100 30");
  setAttribute(svg, "preserveAspectRatio", "none");
  const top = Math.max(most, 1e-9);
  const points = values.map((value, at) => `${((at / (values.length - 1)) * 100).toFixed(2)},${(29 - (value / top) * 27).toFixed(2)}`);
  if (!svg.children.length) svg.append(shape("polygon"), shape("polyline"));
  setAttribute(svg.children[0], "points", `0,30 ${points.join(" ")} 100,30`);
  setAttribute(svg.children[1], "points", points.join(" "));
};

// A bar with the fraction of hits of each tier.
export const split = (svg, parts) => {
  setAttribute(svg, "viewBox", "0 0 100 10");
  setAttribute(svg, "preserveAspectRatio", "none");
  while (svg.children.length > parts.length) svg.lastChild.remove();
  while (svg.children.length < parts.length) svg.append(shape("rect", { y: 0, height: 10 }));
  let from = 0;
  parts.forEach((part, number) => {
    const rect = svg.children[number];
    setAttribute(rect, "class", color(number));
    setAttribute(rect, "x", (from * 100).toFixed(2));
    setAttribute(rect, "width", (part * 100).toFixed(2));
    from += part;
  });
};
