// Formats values like `kvtier status`.

const WHOLE = new Intl.NumberFormat("en");
const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

export const count = (value) => WHOLE.format(Math.round(value));

export const size = (bytes) => {
  for (const [unit, factor] of UNITS) {
    if (bytes >= factor) return `${(bytes / factor).toFixed(1)} ${unit}`;
  }
  return `${bytes} B`;
};

export const percent = (ratio) => (ratio === null || ratio === undefined ? "–" : `${(ratio * 100).toFixed(1)}%`);

export const rate = (perSecond) => (perSecond >= 100 ? count(perSecond) : perSecond.toFixed(perSecond >= 10 || perSecond === 0 ? 0 : 1));

export const age = (seconds) => {
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
};

export const words = (name) => name.replaceAll("_", " ");
