// The list of runs: search it, walk it with keys, choose some for comparing.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { newest, state } from "./live.js";
import { State, go, useKeys, useLive } from "./parts.js";
import { LIVE, ago, count, number, short } from "./words.js";

const MOST = 200; // drawn at once; the search finds the others

function Row({ run, chosen, current, onChoose, onFocus }) {
  const { progress } = run;
  const done = progress.total_steps ? Math.min(1, progress.env_steps / progress.total_steps) : null;
  const live = LIVE.includes(run.state);
  const score = progress.eval_return_mean ?? progress.train_return_mean;
  return html`<tr class=${current ? "current" : ""} data-run=${run.id} onFocusin=${onFocus}>
    <td class="choose">
      <input type="checkbox" aria-label=${`Compare ${run.id}`} checked=${chosen} onChange=${onChoose} /></td>
    <th scope="row"><a href=${`#/run/${run.id}`}>${run.id}</a><span class="about">${run.env} · ${run.algo}</span></th>
    <td class="how"><${State} state=${run.state} /></td>
    <td class="amount" data-label="return">${number(score)}</td>
    <td class="amount" data-label="steps"><span title=${count(progress.env_steps)}>${short(progress.env_steps)}</span>
      ${done !== null && live && html`<progress max="1" value=${done} aria-label="Part of the steps done"></progress>`}</td>
    <td class="amount" data-label="steps/s">${live && run.state !== "RUNNING" ? "–" : short(progress.steps_per_s)}</td>
    <td class="when" data-label="made">${ago(run.created_s)}</td>
  </tr>`;
}

export function Runs() {
  useLive();
  const [wanted, setWanted] = useState("");
  const [chosen, setChosen] = useState([]);
  const [at, setAt] = useState(-1);
  const search = useRef(null);
  useEffect(() => {
    document.title = "Runs · Steppe";
  }, []);
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const found = newest().filter((run) => {
    const text = `${run.id} ${run.env} ${run.algo} ${run.state}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const seek = (event) => {
    setWanted(event.target.value);
    setAt(-1);
  };
  const choose = (id) => setChosen((ids) => (ids.includes(id) ? ids.filter((one) => one !== id) : [...ids, id].slice(-8)));
  const compare = () => chosen.length > 1 && go(`/compare?runs=${chosen.join(",")}`);
  const move = (by) => {
    const next = Math.max(0, Math.min(found.length - 1, at + by));
    setAt(next);
    document.querySelector(`tr[data-run="${found[next]?.id}"] a`)?.focus();
  };
  useKeys({
    "/": () => search.current.focus(), j: () => move(1), k: () => move(-1), c: compare,
    x: () => found[at] && choose(found[at].id),
  });
  const live = newest().filter((run) => LIVE.includes(run.state)).length;
  if (!state.known) return html`<p class="loading">Looking for runs …</p>`;
  if (!state.runs.size) {
    return html`<section class="empty"><h1>No runs yet</h1>
      <p>A run is one experiment: an environment, an algorithm, a seed. Everything it learns is kept here.</p>
      <a class="button primary" href="#/new">Start a run</a></section>`;
  }
  return html`<section class="runs">
    <div class="head"><h1>Runs</h1><p class="sub">${count(state.runs.size)} in all, ${count(live)} under way</p>
      <input type="search" ref=${search} placeholder="Search" aria-label="Search runs" value=${wanted} onInput=${seek} />
      <button disabled=${chosen.length < 2} onClick=${compare}>Compare${chosen.length ? ` ${chosen.length}` : ""}</button>
      <a class="button primary" href="#/new">Start a run</a></div>
    <table class="list">
      <thead><tr>
        <th scope="col" class="choose"><span class="unseen">Compare</span></th><th scope="col">Run</th>
        <th scope="col">State</th><th scope="col" class="amount">Return</th><th scope="col" class="amount">Steps</th>
        <th scope="col" class="amount">Steps/s</th><th scope="col" class="when">Made</th>
      </tr></thead>
      <tbody>${found.slice(0, MOST).map((run, index) => html`<${Row} key=${run.id} run=${run} chosen=${chosen.includes(run.id)}
        current=${index === at} onChoose=${() => choose(run.id)} onFocus=${() => setAt(index)} />`)}</tbody>
    </table>
    ${found.length > MOST && html`<p class="sub">${count(found.length - MOST)} more: search for them.</p>`}
    ${!found.length && html`<p class="nothing">No run has all of these words.</p>`}
  </section>`;
}
