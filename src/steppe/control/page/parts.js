// Small parts that every view uses: states, dialogs that ask first, words about what is under way, keys.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { get, settled } from "./api.js";
import { subscribe } from "./live.js";
import { glyph, titled } from "./words.js";

const LOOK_MS = 2500;

export const go = (hash) => {
  location.hash = hash;
};

// Draw again when the service has said something.
export function useLive() {
  const [, again] = useReducer((n) => n + 1, 0);
  useEffect(() => subscribe(again), []);
}

// What only answers when asked: again and again while the run goes on, once more when it has ended.
export function useLook(path, live, every = LOOK_MS) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    let gone = false;
    let timer = 0;
    const look = async () => {
      try {
        const answer = await get(path);
        if (!gone) setFound(answer);
      } catch {
        // the banner says when the service is away; what was seen stays
      }
      if (live && !gone) timer = setTimeout(look, every);
    };
    look();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [path, live]);
  return found;
}

// A list that only grows, read on from where the last answer ended.
export function useTail(path, name, live, wanted = () => true) {
  const [found, setFound] = useState([]);
  useEffect(() => {
    let gone = false;
    let timer = 0;
    let after = 0;
    setFound([]);
    const look = async () => {
      let more = false;
      try {
        const answer = await get(`${path}?after=${after}&limit=1000`);
        if (gone) return;
        more = answer.next > after;
        after = answer.next;
        const fresh = answer[name].filter(wanted);
        if (fresh.length) setFound((known) => [...known, ...fresh]);
      } catch {
        // the banner says when the service is away
      }
      if (!gone && (more || live)) timer = setTimeout(look, more ? 0 : LOOK_MS);
    };
    look();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [path, live]);
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
  return html`<div class="notes" role="status" aria-live="polite">${notes.map((note) => html`<p key=${note.id} class=${note.bad ? "bad" : ""}>
    <span>${note.text}</span><button class="plain" aria-label="Dismiss" onClick=${() => dismiss(note.id)}>✕</button></p>`)}</div>`;
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

// A question before something that cannot be taken back; the safe answer has the focus.
export function Confirm({ title, children, yes, no = "Cancel", onYes, onClose }) {
  const dialog = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const answer = (act) => () => {
    dialog.current.close();
    act?.();
  };
  return html`<dialog ref=${dialog} aria-labelledby="question" onClose=${onClose}>
    <h2 id="question">${title}</h2>
    <div class="words">${children}</div>
    <div class="row end">
      <button autofocus onClick=${answer()}>${no}</button>
      <button class="danger" onClick=${answer(onYes)}>${yes}</button>
    </div>
  </dialog>`;
}

export const keysOn = () => localStorage.getItem("steppe.keys") !== "off";

const typing = (target) => target.closest("input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable]");

// Single keys, unless somebody is typing, a dialog is open, or keys are switched off.
export function useKeys(keys) {
  const held = useRef(keys);
  held.current = keys;
  useEffect(() => {
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
