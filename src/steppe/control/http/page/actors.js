// The actors of a run: desired and ready number, a slider that sets it, and the state of each actor.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { put } from "./api.js";
import { performOperation, usePolled } from "./parts.js";
import { count, megabytes } from "./format.js";

const POLL_MS = 1500;
const DEBOUNCE_MS = 350; // keys and sliders pass through many numbers before the intended one

// The requested number that the service has not acknowledged yet, or null.
function useRequestedNumber(run) {
  const [requested, setRequested] = useState(null);
  const newest = useRef(null);
  useEffect(() => {
    newest.current = requested;
    if (requested === null) return undefined;
    const timer = setTimeout(async () => {
      const title = `Scaling to ${requested} ${requested === 1 ? "actor" : "actors"}`;
      const send = () => put(`/runs/${run.id}/actors`, { actors: requested });
      await performOperation(title, send, () => newest.current !== requested);
      setRequested((now) => (now === requested ? null : now));
    }, DEBOUNCE_MS);
    return () => clearTimeout(timer);
  }, [requested]);
  return [requested, setRequested];
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
  const observed = usePolled(`/runs/${run.id}/actors`, live, POLL_MS);
  const [requested, setRequested] = useRequestedNumber(run);
  const scalable = live && observed?.most > 0 && ["RUNNING", "PAUSED"].includes(run.state);
  const desired = requested ?? observed?.desired ?? 0;
  const step = (by) => scalable && setRequested(Math.max(0, Math.min(observed.most, desired + by)));
  scaler.current = step;
  return html`<section class="card" id="actors" aria-label="Actors">
    <h2>Actors ${observed && html`<span class="sub"><b data-actors="ready">${observed.ready}</b> of
      <b data-actors="desired"> ${observed.desired}</b> ready</span>`}</h2>
    ${scalable && html`<div class="scale">
      <button aria-label="Remove one actor" title="−" disabled=${desired <= 0} onClick=${() => step(-1)}>−</button>
      <input type="range" min="0" max=${observed.most} step="1" value=${desired} aria-label="Number of actors"
        aria-valuetext=${`${desired} actors`} onInput=${(event) => setRequested(Number(event.target.value))} />
      <button aria-label="Add one actor" title="+" disabled=${desired >= observed.most} onClick=${() => step(1)}>+</button>
      <output>${desired}</output>
    </div>`}
    ${live && observed && !observed.most && html`<p class="sub">The number of actors can change only in mode async on processes and kafka.</p>`}
    ${observed?.actors.length > 0 && html`<${Table} actors=${observed.actors} />`}
    ${!observed?.actors.length && html`<p class="nothing">No actor has reported yet.</p>`}
  </section>`;
}
