// Numbers, times and states as a person reads them.

export const LIVE = ["PENDING", "STARTING", "RUNNING", "PAUSED", "STOPPING"];
const GLYPHS = {
  PENDING: "○", STARTING: "◔", RUNNING: "●", PAUSED: "❚❚", STOPPING: "◑",
  SUCCEEDED: "✓", FAILED: "✕", STOPPED: "■", LOST: "?",
};
export const glyph = (state) => GLYPHS[state] || "·";
export const titled = (state) => state[0] + state.slice(1).toLowerCase();

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

// Beside an axis: no more digits than the distance of its lines needs.
export function tick(value) {
  const size = Math.abs(value);
  if (size >= 10000) return compact.format(value);
  if (size > 0 && size < 0.001) return value.toExponential(0).replace("e-", "e−");
  return String(Number(value.toPrecision(4)));
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export function ago(time_s, now = Date.now() / 1000) {
  const passed = Math.max(0, now - time_s);
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return new Date(time_s * 1000).toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

export function lasting(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export const clock = (time_s) => new Date(time_s * 1000).toLocaleTimeString("en-GB");
export const megabytes = (bytes) => (bytes ? `${Math.round(bytes / 1048576)} MB` : "–");
export const spaced = (name) => name.replaceAll("_", " ");

export function shown(value) {
  if (value === null || value === undefined) return "auto";
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value !== "object") return String(value);
  const written = (one) => (typeof one === "string" ? one : JSON.stringify(one));
  return Object.entries(value).map(([name, one]) => `${name}=${written(one)}`).join(", ");
}
