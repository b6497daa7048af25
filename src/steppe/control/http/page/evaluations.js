// Evaluations of the weights, with a video of an episode if one was recorded. Videos play only on request.

import { html, useState } from "./vendor/htm-preact.js";
import { count, number } from "./format.js";

const SHOWN = 8;

function Row({ one, playing, onPlay }) {
  const spread = one.return_std === null ? "" : html` <span class="sub">± ${number(one.return_std)}</span>`;
  const play = html`<button class="plain" aria-pressed=${playing ? "true" : "false"} onClick=${onPlay}
    aria-label=${`Play the video at ${count(one.env_steps)} steps`}>▶</button>`;
  return html`<tr>
    <th scope="row">${count(one.env_steps)}</th><td>${number(one.return_mean)}${spread}</td>
    <td>${count(one.episodes)}</td><td>${one.recording ? play : "–"}</td>
  </tr>`;
}

export function Evaluations({ run, evaluations }) {
  const [video, setVideo] = useState(null);
  const list = [...evaluations].reverse().slice(0, SHOWN);
  const heads = ["steps", "return", "episodes", "video"];
  return html`<section class="card" id="evaluations" aria-label="Evaluations">
    <h2>Evaluations</h2>
    ${video !== null && html`<figure class="video">
      <img src=${`/api/v1/runs/${run.id}/evaluations/${video}/recording`} alt=${`One episode of evaluation ${video}`} />
      <button onClick=${() => setVideo(null)}>Close the video</button>
    </figure>`}
    ${list.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of evaluations">
      <table class="numbers">
        <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
        <tbody>${list.map((one) => html`<${Row} key=${one.number} one=${one} playing=${video === one.number}
          onPlay=${() => setVideo(video === one.number ? null : one.number)} />`)}</tbody>
      </table></div>`}
    ${!list.length && html`<p class="nothing">No evaluations yet.</p>`}
  </section>`;
}
