// Formats values like `kvtier status`.

const WHOLE = new Intl.NumberFormat("en");
const UNITS = [["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]];

export const count = (value) => WHOLE.format(Math.round(value));

export const size = (bytes) => {
  if (Math.round(bytes) < 1024) return `${Math.round(bytes)} B`;
  for (const [unit, factor] of UNITS) {
    const number = (bytes / factor).toFixed(1);
    if (Number(number) < 1024 || unit === "TiB") return `${number} ${unit}`;
  }
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

export const throughput = (perSecond) => (perSecond === null ? "–" : `${size(perSecond)}/s`);

// Characters that could change or hide other text: controls, bidi controls, zero-width characters, unusual spaces.
const NOT_PRINTABLE = /(?! )[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}]/gu;

const SHORT = { "\t": "\\t", "\n": "\\n", "\r": "\\r" };

const escaped = (character) => {
  if (SHORT[character]) return SHORT[character];
  const hex = character.codePointAt(0).toString(16);
  const [letter, digits] = hex.length <= 2 ? ["x", 2] : hex.length <= 4 ? ["u", 4] : ["U", 8];
  return `\\${letter}${hex.padStart(digits, "0")}`;
};

// Escapes text like the commands of `kvtier`, because clients choose names of engines, models and tenants.
export const printable = (text) => text.replace(NOT_PRINTABLE, escaped);

export const words = (name) => name.replaceAll("_", " ");
