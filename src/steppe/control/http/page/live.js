// What the service tells by itself: one WebSocket for the whole page, opened while the rest of the page is still on its way.
// Keeps the runs, says whether the connection is fresh, and hands metrics to whoever follows a run. After a break it goes on
// where it was, or begins anew.

const STALE_MS = 7000; // three heartbeats
const SILENT_MS = 30000; // for the first message of a new connection
const FIRST_MS = 500;
const FRAME_MS = 200;
const LONGEST_MS = 8000;

const listeners = new Set();
const followers = new Map(); // run → set of {points(series), again()}
export const state = { runs: new Map(), known: false, fresh: false, seen: 0 };

let socket = null;
let epoch = "";
let number = -1;
let wait = FIRST_MS;
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

// With the next frame, or soon where none is drawn: a tab in the background, a busy machine.
let frame = 0;
let late = 0;
function changed() {
  if (late) return;
  frame = requestAnimationFrame(tell);
  late = setTimeout(tell, FRAME_MS);
}

function tell() {
  cancelAnimationFrame(frame);
  clearTimeout(late);
  late = 0;
  for (const listener of [...listeners]) listener();
}

function setFresh(fresh) {
  if (state.fresh === fresh) return;
  state.fresh = fresh;
  changed();
}

const takers = {
  snapshot(message) {
    epoch = message.epoch;
    state.runs = new Map(message.runs.map((run) => [run.id, run]));
    state.known = true;
    for (const set of followers.values()) for (const follower of set) follower.again();
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
    for (const follower of followers.get(message.run) || []) follower.points(message);
  },
};

function take(event) {
  state.seen = Date.now();
  wait = FIRST_MS;
  setFresh(true);
  for (const line of event.data.split("\n")) {
    const message = JSON.parse(line);
    if (message.number !== undefined) number = message.number;
    takers[message.type]?.(message);
  }
}

function connect() {
  clearTimeout(timer);
  state.seen = Date.now();
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const resume = epoch ? `?resume=${epoch}:${number}` : "";
  socket = new WebSocket(`${scheme}://${location.host}/api/v1/stream${resume}`);
  socket.onmessage = take;
  socket.onclose = () => {
    setFresh(false);
    timer = setTimeout(connect, wait);
    wait = Math.min(LONGEST_MS, wait * 2);
  };
}

connect();
setInterval(() => {
  if (Date.now() - state.seen > (state.fresh ? STALE_MS : SILENT_MS)) {
    setFresh(false);
    state.seen = Date.now();
    socket?.close(); // connects again
  }
}, 1000);

export const newest = () => [...state.runs.values()].sort((a, b) => b.created_s - a.created_s);
