// Format numbers, times and states for the reader.

export const LIVE = ["PENDING", "STARTING", "RUNNING", "PAUSED", "STOPPING"];
const GLYPHS = {
  PENDING: "○", STARTING: "◔", RUNNING: "●", PAUSED: "❚❚", STOPPING: "◑",
  SUCCEEDED: "✓", FAILED: "✕", STOPPED: "■", LOST: "?",
};
export const glyph = (state) => GLYPHS[state] || "·";
export const titleCase = (state) => state[0] + state.slice(1).toLowerCase();

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const short = (value) => (value === null || value === undefined ? "–" : compact.format(value));

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 10000) return compact.format(value);
  if (size >= 1000) return whole.format(value);
  if (size >= 100) return value.toFixed(1);
  if (size >= 0.01) return String(Number(value.toPrecision(3)));
  return value.toExponential(1).replace("e-", "e−");
}

// Format a label of an axis.
export function tickLabel(value) {
  const size = Math.abs(value);
  if (size >= 10000) return compact.format(value);
  if (size > 0 && size < 0.001) return value.toExponential(0).replace("e-", "e−");
  return String(Number(value.toPrecision(4)));
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export function ago(time_s, now = Date.now() / 1000) {
  const elapsed = Math.max(0, now - time_s);
  if (elapsed < 60) return "just now";
  if (elapsed < 3600) return `${Math.floor(elapsed / 60)} min ago`;
  if (elapsed < 86400) return `${Math.floor(elapsed / 3600)} h ago`;
  return new Date(time_s * 1000).toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export const timeOfDay = (time_s) => new Date(time_s * 1000).toLocaleTimeString("en-GB");
export const megabytes = (bytes) => (bytes ? `${Math.round(bytes / 1048576)} MB` : "–");
export const withSpaces = (name) => name.replaceAll("_", " ");

export function formatValue(value) {
  if (value === null || value === undefined) return "auto";
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value !== "object") return String(value);
  const written = (one) => (typeof one === "string" ? one : JSON.stringify(one));
  return Object.entries(value).map(([name, one]) => `${name}=${written(one)}`).join(", ");
}
