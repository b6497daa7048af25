// How the weights were judged, with a film of an episode where one was kept. Films play when asked for, and only then.

import { html, useState } from "./vendor/htm-preact.js";
import { count, number } from "./words.js";

const SHOWN = 8;

export function Evaluations({ run, judged }) {
  const [film, setFilm] = useState(null);
  const list = [...judged].reverse().slice(0, SHOWN);
  return html`<section class="card" id="evaluations" aria-label="Evaluations"><h2>Evaluations</h2>
    ${film !== null && html`<figure class="film"><img src=${`/api/v1/runs/${run.id}/evaluations/${film}/recording`} alt=${`One episode of evaluation ${film}`} />
      <button onClick=${() => setFilm(null)}>Stop the film</button></figure>`}
    ${list.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of evaluations"><table class="numbers"><thead><tr><th scope="col">steps</th><th scope="col">return</th><th scope="col">episodes</th><th scope="col">film</th></tr></thead>
      <tbody>${list.map((one) => html`<tr key=${one.number}><th scope="row">${count(one.env_steps)}</th><td>${number(one.return_mean)}${one.return_std !== null ? html` <span class="sub">± ${number(one.return_std)}</span>` : ""}</td><td>${count(one.episodes)}</td>
        <td>${one.recording ? html`<button class="plain" aria-pressed=${film === one.number ? "true" : "false"} aria-label=${`Play the film at ${count(one.env_steps)} steps`} onClick=${() => setFilm(film === one.number ? null : one.number)}>▶</button>` : "–"}</td></tr>`)}</tbody></table></div>`}
    ${!list.length && html`<p class="nothing">None yet.</p>`}</section>`;
}
