// Components and hooks that several views use: states, dialogs, notifications, polling, keyboard shortcuts.

import { html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { get, waitForOperation } from "./api.js";
import { subscribe } from "./live.js";
import { glyph, titleCase } from "./format.js";

const POLL_MS = 2500;

export const go = (hash) => {
  location.hash = hash;
};

// Redraw the component when the service sends a change. Subscribes in a layout effect: a change between drawing and the
// next frame would otherwise be missed.
export function useLive() {
  const [, redraw] = useReducer((n) => n + 1, 0);
  useLayoutEffect(() => subscribe(redraw), []);
}

// Call a function immediately, then every `intervalMs` while `live`. `begin` returns that function. It is given a function
// that tells whether its result is obsolete, and returns whether more can be fetched immediately. The banner shows failures.
export function usePolling(begin, live, intervalMs, dependencies) {
  useEffect(() => {
    let obsolete = false;
    let timer = 0;
    const fetchNext = begin();
    const poll = async () => {
      const more = await fetchNext(() => obsolete).catch(() => false);
      if (!obsolete && (more || live)) timer = setTimeout(poll, more ? 0 : intervalMs);
    };
    poll();
    return () => {
      obsolete = true;
      clearTimeout(timer);
    };
  }, [...dependencies, live]);
}

// The newest response to a request, which is repeated while `live`.
export function usePolled(path, live, intervalMs = POLL_MS) {
  const [response, setResponse] = useState(null);
  const begin = () => async (obsolete) => {
    const found = await get(path);
    if (!obsolete()) setResponse(found);
  };
  usePolling(begin, live, intervalMs, [path]);
  return response;
}

// An append-only list, which is read from the cursor of the last response.
export function useTail(path, name, live, filter = () => true) {
  const [items, setItems] = useState([]);
  const begin = () => {
    let after = 0;
    setItems([]);
    return async (obsolete) => {
      const response = await get(`${path}?after=${after}&limit=1000`);
      if (obsolete()) return false;
      const more = response.next > after;
      after = response.next;
      const added = response[name].filter(filter);
      if (added.length) setItems((known) => [...known, ...added]);
      return more;
    };
  };
  usePolling(begin, live, POLL_MS, [path]);
  return items;
}

export const State = ({ state }) => html`<span class=${`state ${state.toLowerCase()}`}>
  <span class="glyph" aria-hidden="true">${glyph(state)}</span>${titleCase(state)}</span>`;

// Notifications: one line each, announced to screen readers; errors stay until they are dismissed.
const SHOWN_MS = 6000;
let notifications = [];
let redrawNotifications = null;
let lastId = 0;

export function notify(text, { error = false, persistent = error, id = ++lastId } = {}) {
  clearTimeout(notifications.find((one) => one.id === id)?.timer);
  const timer = persistent ? 0 : setTimeout(() => dismiss(id), SHOWN_MS);
  notifications = [...notifications.filter((one) => one.id !== id), { id, text, error, timer }].slice(-4);
  redrawNotifications?.();
  return id;
}

const dismiss = (id) => {
  notifications = notifications.filter((one) => one.id !== id);
  redrawNotifications?.();
};

export function Notifications() {
  const [, redraw] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    redrawNotifications = redraw;
  }, []);
  const Notification = ({ id, text, error }) => html`<p key=${id} class=${error ? "bad" : ""}>
    <span>${text}</span><button class="plain" aria-label="Dismiss" onClick=${() => dismiss(id)}>✕</button>
  </p>`;
  return html`<div class="notes" role="status" aria-live="polite">${notifications.map(Notification)}</div>`;
}

// Send a request for a change, and notify the reader of its progress and outcome.
export async function performOperation(title, send, superseded = () => false) {
  const id = notify(`${title} …`, { persistent: true });
  try {
    const response = await send();
    const operation = response?.operation ?? response;
    const done = operation?.state ? await waitForOperation(operation) : operation;
    if (superseded()) dismiss(id);
    else if (done?.state === "failed") notify(`${title}: ${done.message}`, { error: true, id });
    else notify(`${title}: done${done?.message ? `, ${done.message}` : ""}`, { id });
    return response;
  } catch (problem) {
    notify(`${title}: ${problem.message}`, { error: true, id });
    return null;
  }
}

// A modal dialog that opens before the next key event and counts as closed immediately, so that fast typing goes to the right
// place. The browser's own close event comes later, when the same dialog may be open again.
export function useDialog(onClose) {
  const dialog = useRef(null);
  const closed = useRef(false);
  useLayoutEffect(() => {
    dialog.current.showModal();
  }, []);
  const finish = () => {
    if (closed.current) return;
    closed.current = true;
    onClose();
  };
  const close = () => {
    dialog.current.close();
    finish();
  };
  const onKeyDown = (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    close();
  };
  return { close, attributes: { ref: dialog, onClose: finish, onKeyDown } };
}

// Ask for confirmation. The safe answer has the focus.
export function Confirm({ title, children, yes, no = "Cancel", onYes, onClose }) {
  const { close, attributes } = useDialog(onClose);
  const answer = (act) => () => {
    close();
    act?.();
  };
  return html`<dialog ...${attributes} aria-labelledby="question">
    <h2 id="question">${title}</h2>
    <div class="words">${children}</div>
    <div class="row end">
      <button autofocus onClick=${answer()}>${no}</button>
      <button class="danger" onClick=${answer(onYes)}>${yes}</button>
    </div>
  </dialog>`;
}

export const shortcutsEnabled = () => localStorage.getItem("steppe.keys") !== "off";

const TEXT_INPUTS = "input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable]";
const isTyping = (target) => target.closest(TEXT_INPUTS);

// Single-key shortcuts, except while the user types, a dialog is open, or shortcuts are disabled.
export function useShortcuts(shortcuts) {
  const current = useRef(shortcuts);
  current.current = shortcuts;
  useLayoutEffect(() => {
    const onKeyDown = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
      if (!shortcutsEnabled() || document.querySelector("dialog[open]")) return;
      const action = current.current[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    };
    window.addEventListener("keydown", onKeyDown);
    return () => window.removeEventListener("keydown", onKeyDown);
  }, []);
}
