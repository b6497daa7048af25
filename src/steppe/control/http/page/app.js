// The page: the view that the address selects, the header above it, and global keyboard shortcuts.

import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./vendor/htm-preact.js";
import { remove } from "./api.js";
import { Compare } from "./compare.js";
import { state } from "./live.js";
import { Notifications, go, shortcutsEnabled, useDialog, useLive, useShortcuts } from "./parts.js";
import { RunView } from "./run.js";
import { Runs } from "./runs.js";
import { Start } from "./start.js";
import { timeOfDay } from "./format.js";

const SHORTCUTS = {
  n: "start a run", r: "list of runs", "/": "search the list", "j  k": "next, previous run", Enter: "open the run",
  x: "select it for comparison", c: "compare the selected runs", "+  −": "add or remove an actor", p: "pause or resume",
  s: "stop (asks first)", h: "change hyperparameters", l: "logs", d: "dark or light theme", "?": "show this list",
};

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decodeURIComponent);
  return { name: name || "runs", run: rest[0], query: new URLSearchParams(query || "") };
}

const signOut = () => remove("/session").catch(() => null).then(() => location.reload());
const toggleTheme = () => window.dispatchEvent(new Event("steppe:toggle-theme"));

function Shortcuts({ onClose }) {
  const { close, attributes } = useDialog(onClose);
  const [enabled, setEnabled] = useState(shortcutsEnabled());
  const toggle = (event) => {
    localStorage.setItem("steppe.keys", event.target.checked ? "on" : "off");
    setEnabled(event.target.checked);
  };
  const Row = ([key, action]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${action}</dd></div>`;
  return html`<dialog ...${attributes} aria-labelledby="keys">
    <h2 id="keys">Keyboard shortcuts</h2>
    <dl class="keys">${Object.entries(SHORTCUTS).map(Row)}</dl>
    <label class="check"><input type="checkbox" checked=${enabled} onChange=${toggle} /> Enable keyboard shortcuts</label>
    <div class="row end"><button autofocus onClick=${close}>Close</button></div>
  </dialog>`;
}

function Banner({ signedOut }) {
  if (signedOut) {
    return html`<p class="banner" role="alert">You are signed out. <code>steppe serve --sign-in</code> prints a new link
      while the service runs.</p>`;
  }
  if (state.connected || !state.loaded) return null;
  const time = timeOfDay(state.lastMessageMs / 1000);
  return html`<p class="banner" role="alert">Connection lost: this page shows the state at ${time}. Runs continue; reconnecting …</p>`;
}

function View({ route: at }) {
  const [error, reset] = useErrorBoundary((found) => console.error(found));
  useEffect(() => reset(), [at.name, at.run]);
  if (error) return html`<p class="nothing">This view failed: ${String(error.message)}. <a href="#/">All runs</a></p>`;
  if (at.name === "run") return html`<${RunView} key=${at.run} id=${at.run} />`;
  if (at.name === "new") return html`<${Start} from=${at.query.get("from")} />`;
  if (at.name === "compare") return html`<${Compare} ids=${(at.query.get("runs") || "").split(",").filter(Boolean)} />`;
  return html`<${Runs} />`;
}

function Page() {
  useLive();
  const [current, setCurrent] = useState(route());
  const [signedOut, setSignedOut] = useState(false);
  const [help, setHelp] = useState(false);
  const main = useRef(null);
  useEffect(() => {
    const onNavigate = () => {
      setCurrent(route());
      scrollTo(0, 0);
      main.current.focus({ preventScroll: true });
    };
    const onSignedOut = () => setSignedOut(true);
    window.addEventListener("hashchange", onNavigate);
    window.addEventListener("steppe:signed-out", onSignedOut);
    return () => {
      window.removeEventListener("hashchange", onNavigate);
      window.removeEventListener("steppe:signed-out", onSignedOut);
    };
  }, []);
  useShortcuts({ n: () => go("/new"), r: () => go("/"), d: toggleTheme, "?": () => setHelp(true) });
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  const ariaCurrent = (name) => (current.name === name ? "page" : null);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <header class="bar">
      <a class="brand" href="#/" aria-label="Steppe, all runs">
        <img src="/page/mark.svg" alt="" width="24" height="24" />Steppe</a>
      <nav aria-label="Main">
        <a href="#/" aria-current=${ariaCurrent("runs")}>Runs</a>
        <a href="#/new" aria-current=${ariaCurrent("new")}>Start a run</a>
      </nav>
      <span class=${state.connected ? "link connected" : "link"}>
        <span class="glyph" aria-hidden="true">${state.connected ? "●" : "○"}</span>${state.connected ? "live" : "offline"}</span>
      <button class="plain icon" aria-label="Dark or light theme" title="Dark or light theme (d)" onClick=${toggleTheme}>◐</button>
      <button class="plain icon" aria-label="Keyboard shortcuts" title="Keyboard shortcuts (?)" onClick=${() => setHelp(true)}>?</button>
      <button class="plain" onClick=${signOut}>Sign out</button>
    </header>
    <${Banner} signedOut=${signedOut} />
    <main id="main" ref=${main} tabindex="-1" class=${state.connected || !state.loaded ? "" : "stale"}><${View} route=${current} /></main>
    <${Notifications} />
    ${help && html`<${Shortcuts} onClose=${() => setHelp(false)} />`}`;
}

const root = document.getElementById("page");
root.textContent = "";
render(html`<${Page} />`, root);
