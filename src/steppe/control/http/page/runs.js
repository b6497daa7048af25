// The list of runs: search, keyboard navigation, and selection for comparison.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { newest, state } from "./live.js";
import { State, go, useLive, useShortcuts } from "./parts.js";
import { LIVE, ago, count, number, short } from "./format.js";

const MAX_ROWS = 200; // the search finds the other runs

function Row({ run, selected, current, onSelect, onFocus }) {
  const { progress } = run;
  const done = progress.total_steps ? Math.min(1, progress.env_steps / progress.total_steps) : null;
  const live = LIVE.includes(run.state);
  const score = progress.eval_return_mean ?? progress.train_return_mean;
  return html`<tr class=${current ? "current" : ""} data-run=${run.id} onFocusin=${onFocus}>
    <td class="choose">
      <input type="checkbox" aria-label=${`Compare ${run.id}`} checked=${selected} onChange=${onSelect} /></td>
    <th scope="row"><a href=${`#/run/${run.id}`}>${run.id}</a><span class="about">${run.env} · ${run.algo}</span></th>
    <td class="state-cell"><${State} state=${run.state} /></td>
    <td class="amount" data-label="return">${number(score)}</td>
    <td class="amount" data-label="steps"><span title=${count(progress.env_steps)}>${short(progress.env_steps)}</span>
      ${done !== null && live && html`<progress max="1" value=${done} aria-label="Share of the steps that are done"></progress>`}</td>
    <td class="amount" data-label="steps/s">${live && run.state !== "RUNNING" ? "–" : short(progress.steps_per_s)}</td>
    <td class="when" data-label="created">${ago(run.created_s)}</td>
  </tr>`;
}

export function Runs() {
  useLive();
  const [query, setQuery] = useState("");
  const [selected, setSelected] = useState([]);
  const [position, setPosition] = useState(-1);
  const searchBox = useRef(null);
  useEffect(() => {
    document.title = "Runs · Steppe";
  }, []);
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = newest().filter((run) => {
    const text = `${run.id} ${run.env} ${run.algo} ${run.state}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const search = (event) => {
    setQuery(event.target.value);
    setPosition(-1);
  };
  const toggle = (id) => setSelected((ids) => (ids.includes(id) ? ids.filter((one) => one !== id) : [...ids, id].slice(-8)));
  const compare = () => selected.length > 1 && go(`/compare?runs=${selected.join(",")}`);
  const move = (by) => {
    const next = Math.max(0, Math.min(found.length - 1, position + by));
    setPosition(next);
    document.querySelector(`tr[data-run="${found[next]?.id}"] a`)?.focus();
  };
  useShortcuts({
    "/": () => searchBox.current.focus(), j: () => move(1), k: () => move(-1), c: compare,
    x: () => found[position] && toggle(found[position].id),
  });
  const live = newest().filter((run) => LIVE.includes(run.state)).length;
  if (!state.loaded) return html`<p class="loading">Loading runs …</p>`;
  if (!state.runs.size) {
    return html`<section class="empty"><h1>No runs yet</h1>
      <p>A run is one experiment with an environment, an algorithm and a seed.</p>
      <a class="button primary" href="#/new">Start a run</a></section>`;
  }
  return html`<section class="runs">
    <div class="head"><h1>Runs</h1><p class="sub">${count(state.runs.size)} in total, ${count(live)} active</p>
      <input type="search" ref=${searchBox} placeholder="Search" aria-label="Search runs" value=${query} onInput=${search} />
      <button disabled=${selected.length < 2} onClick=${compare}>Compare${selected.length ? ` ${selected.length}` : ""}</button>
      <a class="button primary" href="#/new">Start a run</a></div>
    <table class="list">
      <thead><tr>
        <th scope="col" class="choose"><span class="visually-hidden">Compare</span></th><th scope="col">Run</th>
        <th scope="col">State</th><th scope="col" class="amount">Return</th><th scope="col" class="amount">Steps</th>
        <th scope="col" class="amount">Steps/s</th><th scope="col" class="when">Created</th>
      </tr></thead>
      <tbody>${found.slice(0, MAX_ROWS).map((run, index) => html`<${Row} key=${run.id} run=${run} selected=${selected.includes(run.id)}
        current=${index === position} onSelect=${() => toggle(run.id)} onFocus=${() => setPosition(index)} />`)}</tbody>
    </table>
    ${found.length > MAX_ROWS && html`<p class="sub">${count(found.length - MAX_ROWS)} more; use the search to find them.</p>`}
    ${!found.length && html`<p class="nothing">No run matches the search.</p>`}
  </section>`;
}
