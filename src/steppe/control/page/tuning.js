// Hyperparameters of a run: change some, see when each takes effect before it is sent, then send them together.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { get, patch } from "./api.js";
import { Field, read } from "./fields.js";
import { carryOut } from "./parts.js";
import { shown, spaced } from "./words.js";

const EFFECTS = { live: "with the next update", restart: "on restart", fixed: "fixed in this run" };

export function Tuning({ run }) {
  const [known, setKnown] = useState(null);
  const [typed, setTyped] = useState({});
  const [plan, setPlan] = useState(null);
  const load = () => get(`/runs/${run.id}/hyperparameters`).then((found) => setKnown(found.hyperparameters), () => {});
  useEffect(() => {
    load();
  }, [run.id, run.generation]);
  const changed = Object.entries(typed).filter(([, text]) => text !== "");
  const errors = {};
  const values = {};
  for (const [name, text] of changed) {
    try {
      values[name] = read(known.find((one) => one.name === name).schema, text);
    } catch (error) {
      errors[name] = error.message;
    }
  }
  const key = JSON.stringify(values);
  useEffect(() => {
    setPlan(null);
    if (!Object.keys(values).length) return undefined;
    const timer = setTimeout(() => {
      patch(`/runs/${run.id}/hyperparameters`, { values, dry_run: true }).then((found) => setPlan(found), (problem) => setPlan({ problem: problem.message }));
    }, 250);
    return () => clearTimeout(timer);
  }, [key, run.state]);
  const apply = async (event) => {
    event.preventDefault();
    const names = Object.keys(values);
    if (!names.length || Object.keys(errors).length) return;
    const done = await carryOut(`Changing ${names.map(spaced).join(", ")}`, () => patch(`/runs/${run.id}/hyperparameters`, { values }));
    if (done) setTyped({});
    load();
  };
  if (!known) return null;
  const open = run.state !== "SUCCEEDED";
  const groups = ["live", "restart", "fixed"].map((effect) => [effect, known.filter((one) => one.effect === effect)]).filter(([, names]) => names.length);
  return html`<section class="card" id="tuning" aria-label="Hyperparameters"><h2>Hyperparameters</h2>
    <form onSubmit=${apply} novalidate>
      ${groups.map(([effect, list]) => html`<details key=${effect} class="group" open=${effect === "live"}><summary>${list.length} that change ${effect === "fixed" ? "never" : EFFECTS[effect]}</summary>
        ${effect === "fixed" || !open
          ? html`<dl class="values">${list.map((one) => html`<div key=${one.name}><dt>${spaced(one.name)}</dt><dd data-value=${one.name}>${shown(one.value)}</dd></div>`)}</dl>`
          : html`<div class="fields tight">${list.map((one) => html`<${Field} key=${one.name} id=${`h-${one.name}`} name=${one.name} schema=${{ ...one.schema, default: one.value }} description=${one.description}
              value=${typed[one.name] || ""} error=${errors[one.name]} onChange=${(text) => setTyped((now) => ({ ...now, [one.name]: text }))} />`)}</div>`}
      </details>`)}
      ${changed.length > 0 && html`<div class="plan" role="group" aria-label="Changes">
        ${plan?.problem && html`<p class="bad">${plan.problem}</p>`}
        <ul>${(plan?.effects || []).map((one) => html`<li key=${one.name}><b>${spaced(one.name)}</b> ${shown(one.before)} → ${shown(one.after)}, ${one.effect}</li>`)}</ul>
        <div class="row"><button class="primary" type="submit" disabled=${!plan?.effects || Object.keys(errors).length > 0}>Apply</button>
          <button type="button" onClick=${() => setTyped({})}>Discard</button></div></div>`}
    </form></section>`;
}
