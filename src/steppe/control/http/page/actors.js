// The actors of a run: how many are wanted and there, each one's state and restarts, and a slider for how many.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { put } from "./api.js";
import { carryOut, useLook } from "./parts.js";
import { count, megabytes } from "./words.js";

const EVERY_MS = 1500;
const SETTLE_MS = 350; // keys and sliders go through many numbers on their way to the one that is meant

// The number that somebody wants and the service has not acknowledged yet; null when there is none.
function useWish(run) {
  const [wish, setWish] = useState(null);
  const newest = useRef(null);
  useEffect(() => {
    newest.current = wish;
    if (wish === null) return undefined;
    const timer = setTimeout(async () => {
      const words = `Scaling to ${wish} ${wish === 1 ? "actor" : "actors"}`;
      await carryOut(words, () => put(`/runs/${run.id}/actors`, { actors: wish }), () => newest.current !== wish);
      setWish((now) => (now === wish ? null : now));
    }, SETTLE_MS);
    return () => clearTimeout(timer);
  }, [wish]);
  return [wish, setWish];
}

function Table({ actors }) {
  const heads = ["actor", "state", "restarts", "steps", "version", "memory"];
  const Row = (actor) => html`<tr key=${actor.actor} data-actor=${actor.actor}>
    <th scope="row">${actor.actor}</th>
    <td class="word"><span class=${`dot ${actor.state}`} aria-hidden="true"></span>${actor.state}</td>
    <td>${count(actor.epoch)}</td><td>${count(actor.env_steps)}</td><td>${count(actor.version)}</td>
    <td>${megabytes(actor.rss_bytes)}</td>
  </tr>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of actors"><table class="numbers">
    <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead><tbody>${actors.map(Row)}</tbody>
  </table></div>`;
}

export function Actors({ run, live, scaler }) {
  const seen = useLook(`/runs/${run.id}/actors`, live, EVERY_MS);
  const [wish, setWish] = useWish(run);
  const able = live && seen?.most > 0 && ["RUNNING", "PAUSED"].includes(run.state);
  const wanted = wish ?? seen?.desired ?? 0;
  const step = (by) => able && setWish(Math.max(0, Math.min(seen.most, wanted + by)));
  scaler.current = step;
  return html`<section class="card" id="actors" aria-label="Actors">
    <h2>Actors ${seen && html`<span class="sub"><b data-actors="ready">${seen.ready}</b> ready of
      <b data-actors="desired"> ${seen.desired}</b> wanted</span>`}</h2>
    ${able && html`<div class="scale">
      <button aria-label="One actor less" title="−" disabled=${wanted <= 0} onClick=${() => step(-1)}>−</button>
      <input type="range" min="0" max=${seen.most} step="1" value=${wanted} aria-label="Number of actors"
        aria-valuetext=${`${wanted} actors`} onInput=${(event) => setWish(Number(event.target.value))} />
      <button aria-label="One actor more" title="+" disabled=${wanted >= seen.most} onClick=${() => step(1)}>+</button>
      <output>${wanted}</output>
    </div>`}
    ${live && seen && !seen.most && html`<p class="sub">Their number can change in mode async on processes and kafka only.</p>`}
    ${seen?.actors.length > 0 && html`<${Table} actors=${seen.actors} />`}
    ${!seen?.actors.length && html`<p class="nothing">None has reported yet.</p>`}
  </section>`;
}
