// How the weights were judged, with a film of an episode where one was kept. Films play when asked for, and only then.

import { html, useState } from "./vendor/htm-preact.js";
import { count, number } from "./words.js";

const SHOWN = 8;

function Row({ one, playing, onPlay }) {
  const spread = one.return_std === null ? "" : html` <span class="sub">± ${number(one.return_std)}</span>`;
  const play = html`<button class="plain" aria-pressed=${playing ? "true" : "false"} onClick=${onPlay}
    aria-label=${`Play the film at ${count(one.env_steps)} steps`}>▶</button>`;
  return html`<tr>
    <th scope="row">${count(one.env_steps)}</th><td>${number(one.return_mean)}${spread}</td>
    <td>${count(one.episodes)}</td><td>${one.recording ? play : "–"}</td>
  </tr>`;
}

export function Evaluations({ run, judged }) {
  const [film, setFilm] = useState(null);
  const list = [...judged].reverse().slice(0, SHOWN);
  const heads = ["steps", "return", "episodes", "film"];
  return html`<section class="card" id="evaluations" aria-label="Evaluations">
    <h2>Evaluations</h2>
    ${film !== null && html`<figure class="film">
      <img src=${`/api/v1/runs/${run.id}/evaluations/${film}/recording`} alt=${`One episode of evaluation ${film}`} />
      <button onClick=${() => setFilm(null)}>Stop the film</button>
    </figure>`}
    ${list.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of evaluations">
      <table class="numbers">
        <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
        <tbody>${list.map((one) => html`<${Row} key=${one.number} one=${one} playing=${film === one.number}
          onPlay=${() => setFilm(film === one.number ? null : one.number)} />`)}</tbody>
      </table></div>`}
    ${!list.length && html`<p class="nothing">None yet.</p>`}
  </section>`;
}
