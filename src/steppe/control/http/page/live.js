// The stream of changes: one WebSocket for the whole page, opened while the rest of the page is still loading. Keeps the
// list of runs and the state of the connection, and passes metrics to the followers of a run. After an interruption it resumes
// at the last message, or starts again with a snapshot.

const STALE_MS = 7000; // three heartbeats
const SILENT_MS = 30000; // for the first message of a new connection
const MIN_BACKOFF_MS = 500;
const MAX_BACKOFF_MS = 8000;
const MAX_FRAME_MS = 200;

const listeners = new Set();
const followers = new Map(); // run → set of {onPoints(message), onSnapshot()}
export const state = { runs: new Map(), loaded: false, connected: false, lastMessageMs: 0 };

let socket = null;
let epoch = "";
let number = -1;
let backoffMs = MIN_BACKOFF_MS;
let timer = 0;

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function follow(run, follower) {
  if (!followers.has(run)) followers.set(run, new Set());
  followers.get(run).add(follower);
  return () => followers.get(run).delete(follower);
}

// Notify listeners with the next frame, or after a short time if none is drawn (a background tab, a busy machine).
let frame = 0;
let fallback = 0;
function changed() {
  if (fallback) return;
  frame = requestAnimationFrame(notifyListeners);
  fallback = setTimeout(notifyListeners, MAX_FRAME_MS);
}

function notifyListeners() {
  cancelAnimationFrame(frame);
  clearTimeout(fallback);
  fallback = 0;
  for (const listener of [...listeners]) listener();
}

function setConnected(connected) {
  if (state.connected === connected) return;
  state.connected = connected;
  changed();
}

const handlers = {
  snapshot(message) {
    epoch = message.epoch;
    state.runs = new Map(message.runs.map((run) => [run.id, run]));
    state.loaded = true;
    for (const set of followers.values()) for (const follower of set) follower.onSnapshot();
    changed();
  },
  run(message) {
    state.runs.set(message.run.id, message.run);
    changed();
  },
  removed(message) {
    state.runs.delete(message.run);
    changed();
  },
  metrics(message) {
    for (const follower of followers.get(message.run) || []) follower.onPoints(message);
  },
};

function receive(event) {
  state.lastMessageMs = Date.now();
  backoffMs = MIN_BACKOFF_MS;
  setConnected(true);
  for (const line of event.data.split("\n")) {
    const message = JSON.parse(line);
    if (message.number !== undefined) number = message.number;
    handlers[message.type]?.(message);
  }
}

function connect() {
  clearTimeout(timer);
  state.lastMessageMs = Date.now();
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const resume = epoch ? `?resume=${epoch}:${number}` : "";
  socket = new WebSocket(`${scheme}://${location.host}/api/v1/stream${resume}`);
  socket.onmessage = receive;
  socket.onclose = () => {
    setConnected(false);
    timer = setTimeout(connect, backoffMs);
    backoffMs = Math.min(MAX_BACKOFF_MS, backoffMs * 2);
  };
}

connect();
setInterval(() => {
  if (Date.now() - state.lastMessageMs > (state.connected ? STALE_MS : SILENT_MS)) {
    setConnected(false);
    state.lastMessageMs = Date.now();
    socket?.close(); // onclose reconnects
  }
}, 1000);

export const newest = () => [...state.runs.values()].sort((a, b) => b.created_s - a.created_s);
