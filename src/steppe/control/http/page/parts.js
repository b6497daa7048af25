// Small parts that every view uses: states, dialogs that ask first, words about what is under way, keys.

import { html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { get, settled } from "./api.js";
import { subscribe } from "./live.js";
import { glyph, titled } from "./words.js";

const LOOK_MS = 2500;

export const go = (hash) => {
  location.hash = hash;
};

// Draw again when the service has said something. With the drawing, not after the next frame: what is said in between would
// never be drawn.
export function useLive() {
  const [, again] = useReducer((n) => n + 1, 0);
  useLayoutEffect(() => subscribe(again), []);
}

// Ask at once, then again and again while `live`. `begin` gives the function that asks; it is told how to see that nobody
// wants the answer any more, and says whether there is more to have right away. Failures show in the banner.
export function useAsking(begin, live, every, dependencies) {
  useEffect(() => {
    let gone = false;
    let timer = 0;
    const ask = begin();
    const look = async () => {
      const more = await ask(() => gone).catch(() => false);
      if (!gone && (more || live)) timer = setTimeout(look, more ? 0 : every);
    };
    look();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [...dependencies, live]);
}

// What only answers when asked.
export function useLook(path, live, every = LOOK_MS) {
  const [found, setFound] = useState(null);
  const begin = () => async (gone) => {
    const answer = await get(path);
    if (!gone()) setFound(answer);
  };
  useAsking(begin, live, every, [path]);
  return found;
}

// A list that only grows, read on from where the last answer ended.
export function useTail(path, name, live, wanted = () => true) {
  const [found, setFound] = useState([]);
  const begin = () => {
    let after = 0;
    setFound([]);
    return async (gone) => {
      const answer = await get(`${path}?after=${after}&limit=1000`);
      if (gone()) return false;
      const more = answer.next > after;
      after = answer.next;
      const fresh = answer[name].filter(wanted);
      if (fresh.length) setFound((known) => [...known, ...fresh]);
      return more;
    };
  };
  useAsking(begin, live, LOOK_MS, [path]);
  return found;
}

export const State = ({ state }) => html`<span class=${`state ${state.toLowerCase()}`}>
  <span class="glyph" aria-hidden="true">${glyph(state)}</span>${titled(state)}</span>`;

// What is said to the reader: one line, read out, gone after a while unless it is bad news.
const SHOWN_MS = 6000;
let notes = [];
let listener = null;
let last = 0;

export function say(text, { bad = false, stays = bad, id = ++last } = {}) {
  clearTimeout(notes.find((note) => note.id === id)?.timer);
  const timer = stays ? 0 : setTimeout(() => dismiss(id), SHOWN_MS);
  notes = [...notes.filter((note) => note.id !== id), { id, text, bad, timer }].slice(-4);
  listener?.();
  return id;
}

const dismiss = (id) => {
  notes = notes.filter((note) => note.id !== id);
  listener?.();
};

export function Notes() {
  const [, again] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    listener = again;
  }, []);
  const Note = (note) => html`<p key=${note.id} class=${note.bad ? "bad" : ""}>
    <span>${note.text}</span><button class="plain" aria-label="Dismiss" onClick=${() => dismiss(note.id)}>✕</button>
  </p>`;
  return html`<div class="notes" role="status" aria-live="polite">${notes.map(Note)}</div>`;
}

// Ask for a change, say so, and say what became of it.
export async function carryOut(words, asking, superseded = () => false) {
  const id = say(`${words} …`, { stays: true });
  try {
    const answer = await asking();
    const operation = answer?.operation ?? answer;
    const done = operation?.state ? await settled(operation) : operation;
    if (superseded()) dismiss(id);
    else if (done?.state === "failed") say(`${words}: ${done.message}`, { bad: true, id });
    else say(`${words}: done${done?.message ? `, ${done.message}` : ""}`, { id });
    return answer;
  } catch (problem) {
    say(`${words}: ${problem.message}`, { bad: true, id });
    return null;
  }
}

// A dialog that is open before the next key is heard, and over as soon as it is closed: what somebody types fast is meant for it,
// or no longer. The browser itself says that it was closed a moment later, when the same one may have been asked for again.
export function useDialog(onClose) {
  const dialog = useRef(null);
  const over = useRef(false);
  useLayoutEffect(() => {
    dialog.current.showModal();
  }, []);
  const ended = () => {
    if (over.current) return;
    over.current = true;
    onClose();
  };
  const close = () => {
    dialog.current.close();
    ended();
  };
  const pressed = (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    close();
  };
  return { close, parts: { ref: dialog, onClose: ended, onKeyDown: pressed } };
}

// A question before something that cannot be taken back; the safe answer has the focus.
export function Confirm({ title, children, yes, no = "Cancel", onYes, onClose }) {
  const { close, parts } = useDialog(onClose);
  const answer = (act) => () => {
    close();
    act?.();
  };
  return html`<dialog ...${parts} aria-labelledby="question">
    <h2 id="question">${title}</h2>
    <div class="words">${children}</div>
    <div class="row end">
      <button autofocus onClick=${answer()}>${no}</button>
      <button class="danger" onClick=${answer(onYes)}>${yes}</button>
    </div>
  </dialog>`;
}

export const keysOn = () => localStorage.getItem("steppe.keys") !== "off";

const TYPED = "input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable]";
const typing = (target) => target.closest(TYPED);

// Single keys, unless somebody is typing, a dialog is open, or keys are switched off.
export function useKeys(keys) {
  const held = useRef(keys);
  held.current = keys;
  useLayoutEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
      if (!keysOn() || document.querySelector("dialog[open]")) return;
      const act = held.current[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  }, []);
}
