// The page: which view the address names, the bar above it, and what is the same everywhere.

import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./vendor/htm-preact.js";
import { remove } from "./api.js";
import { Compare } from "./compare.js";
import { state } from "./live.js";
import { Notes, go, keysOn, useDialog, useKeys, useLive } from "./parts.js";
import { RunView } from "./run.js";
import { Runs } from "./runs.js";
import { Start } from "./start.js";
import { clock } from "./words.js";

const KEYS = {
  n: "start a run", r: "list of runs", "/": "search the list", "j  k": "move in the list", Enter: "open the run",
  x: "choose it for comparing", c: "compare what is chosen", "+  −": "add or remove an actor", p: "pause, resume",
  s: "stop, after a question", h: "change hyperparameters", l: "logs", d: "dark or light", "?": "these keys",
};

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decodeURIComponent);
  return { name: name || "runs", run: rest[0], query: new URLSearchParams(query || "") };
}

const signOut = () => remove("/session").catch(() => null).then(() => location.reload());
const nextTheme = () => window.dispatchEvent(new Event("steppe:turn"));

function Keys({ onClose }) {
  const { close, parts } = useDialog(onClose);
  const [on, setOn] = useState(keysOn());
  const turn = (event) => {
    localStorage.setItem("steppe.keys", event.target.checked ? "on" : "off");
    setOn(event.target.checked);
  };
  return html`<dialog ...${parts} aria-labelledby="keys">
    <h2 id="keys">Keys</h2>
    <dl class="keys">${Object.entries(KEYS).map(([key, words]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${words}</dd></div>`)}</dl>
    <label class="check"><input type="checkbox" checked=${on} onChange=${turn} /> single keys do something</label>
    <div class="row end"><button autofocus onClick=${close}>Close</button></div>
  </dialog>`;
}

function Banner({ signedOut }) {
  if (signedOut) {
    return html`<p class="banner" role="alert">You are signed out. <code>steppe serve --sign-in</code> prints a new link
      while the service runs.</p>`;
  }
  if (state.fresh || !state.known) return null;
  const seen = clock(state.seen / 1000);
  return html`<p class="banner" role="alert">Connection lost: what you see is from ${seen}. Runs go on; trying again …</p>`;
}

function View({ at }) {
  const [error, reset] = useErrorBoundary((found) => console.error(found));
  useEffect(() => reset(), [at.name, at.run]);
  if (error) return html`<p class="nothing">This view broke: ${String(error.message)}. <a href="#/">All runs</a></p>`;
  if (at.name === "run") return html`<${RunView} key=${at.run} id=${at.run} />`;
  if (at.name === "new") return html`<${Start} from=${at.query.get("from")} />`;
  if (at.name === "compare") return html`<${Compare} ids=${(at.query.get("runs") || "").split(",").filter(Boolean)} />`;
  return html`<${Runs} />`;
}

function Page() {
  useLive();
  const [at, setAt] = useState(route());
  const [signedOut, setSignedOut] = useState(false);
  const [help, setHelp] = useState(false);
  const main = useRef(null);
  useEffect(() => {
    const moved = () => {
      setAt(route());
      scrollTo(0, 0);
      main.current.focus({ preventScroll: true });
    };
    const out = () => setSignedOut(true);
    window.addEventListener("hashchange", moved);
    window.addEventListener("steppe:signed-out", out);
    return () => {
      window.removeEventListener("hashchange", moved);
      window.removeEventListener("steppe:signed-out", out);
    };
  }, []);
  useKeys({ n: () => go("/new"), r: () => go("/"), d: nextTheme, "?": () => setHelp(true) });
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  const here = (name) => (at.name === name ? "page" : null);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <header class="bar">
      <a class="brand" href="#/" aria-label="Steppe, all runs">
        <img src="/page/mark.svg" alt="" width="24" height="24" />Steppe</a>
      <nav aria-label="Main">
        <a href="#/" aria-current=${here("runs")}>Runs</a>
        <a href="#/new" aria-current=${here("new")}>Start a run</a>
      </nav>
      <span class=${state.fresh ? "link fresh" : "link"}>
        <span class="glyph" aria-hidden="true">${state.fresh ? "●" : "○"}</span>${state.fresh ? "live" : "offline"}</span>
      <button class="plain icon" aria-label="Dark or light" title="Dark or light (d)" onClick=${nextTheme}>◐</button>
      <button class="plain icon" aria-label="Keys" title="Keys (?)" onClick=${() => setHelp(true)}>?</button>
      <button class="plain" onClick=${signOut}>Sign out</button>
    </header>
    <${Banner} signedOut=${signedOut} />
    <main id="main" ref=${main} tabindex="-1" class=${state.fresh || !state.known ? "" : "stale"}><${View} at=${at} /></main>
    <${Notes} />
    ${help && html`<${Keys} onClose=${() => setHelp(false)} />`}`;
}

const root = document.getElementById("page");
root.textContent = "";
render(html`<${Page} />`, root);
