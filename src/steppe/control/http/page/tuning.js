// Hyperparameters of a run: change some, see when each takes effect before it is sent, then send them together.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { get, patch } from "./api.js";
import { Field, read } from "./fields.js";
import { carryOut } from "./parts.js";
import { shown, spaced } from "./words.js";

const SETTLE_MS = 250; // of typing
const GROUPS = { live: "change with the next update", restart: "change on restart", fixed: "change never" };

function Values({ list }) {
  return html`<dl class="values">${list.map((one) => html`<div key=${one.name}>
    <dt>${spaced(one.name)}</dt><dd data-value=${one.name}>${shown(one.value)}</dd></div>`)}</dl>`;
}

function Fields({ list, typed, errors, onType }) {
  return html`<div class="fields tight">${list.map((one) => html`<${Field} key=${one.name} id=${`h-${one.name}`} name=${one.name}
    schema=${{ ...one.schema, default: one.value }} description=${one.description} value=${typed[one.name] || ""}
    error=${errors[one.name]} onChange=${(text) => onType(one.name, text)} />`)}</div>`;
}

function Plan({ plan, ready, onDiscard }) {
  return html`<div class="plan" role="group" aria-label="Changes">
    ${plan?.problem && html`<p class="bad">${plan.problem}</p>`}
    <ul>${(plan?.effects || []).map((one) => html`<li key=${one.name}>
      <b>${spaced(one.name)}</b> ${shown(one.before)} → ${shown(one.after)}, ${one.effect}</li>`)}</ul>
    <div class="row"><button class="primary" type="submit" disabled=${!ready}>Apply</button>
      <button type="button" onClick=${onDiscard}>Discard</button></div>
  </div>`;
}

// What was typed as values, and what is wrong with the rest.
function parsed(known, typed) {
  const values = {};
  const errors = {};
  for (const [name, text] of Object.entries(typed)) {
    if (text === "") continue;
    try {
      values[name] = read(known.find((one) => one.name === name).schema, text);
    } catch (error) {
      errors[name] = error.message;
    }
  }
  return { values, errors };
}

export function Tuning({ run }) {
  const [known, setKnown] = useState(null);
  const [typed, setTyped] = useState({});
  const [plan, setPlan] = useState(null);
  const path = `/runs/${run.id}/hyperparameters`;
  const load = () => get(path).then((found) => setKnown(found.hyperparameters), () => {});
  useEffect(() => {
    load();
  }, [run.id, run.generation]);
  const { values, errors } = parsed(known, typed);
  const names = Object.keys(values);
  const wrong = Object.keys(errors).length > 0;
  useEffect(() => {
    setPlan(null);
    if (!names.length) return undefined;
    const dry = () => patch(path, { values, dry_run: true }).then(setPlan, (problem) => setPlan({ problem: problem.message }));
    const timer = setTimeout(dry, SETTLE_MS);
    return () => clearTimeout(timer);
  }, [JSON.stringify(values), run.state]);
  const apply = async (event) => {
    event.preventDefault();
    if (!names.length || wrong) return;
    if (await carryOut(`Changing ${names.map(spaced).join(", ")}`, () => patch(path, { values }))) setTyped({});
    load();
  };
  if (!known) return null;
  const fixed = (effect) => effect === "fixed" || run.state === "SUCCEEDED";
  const type = (name, text) => setTyped((now) => ({ ...now, [name]: text }));
  const Group = ([effect, words]) => {
    const list = known.filter((one) => one.effect === effect);
    return list.length > 0 && html`<details key=${effect} class="group" open=${effect === "live"}>
      <summary>${list.length} that ${words}</summary>
      ${fixed(effect) && html`<${Values} list=${list} />`}
      ${!fixed(effect) && html`<${Fields} list=${list} typed=${typed} errors=${errors} onType=${type} />`}
    </details>`;
  };
  return html`<section class="card" id="tuning" aria-label="Hyperparameters"><h2>Hyperparameters</h2>
    <form onSubmit=${apply} novalidate>
      ${Object.entries(GROUPS).map(Group)}
      ${(names.length > 0 || wrong) && html`<${Plan} plan=${plan} ready=${plan?.effects && !wrong} onDiscard=${() => setTyped({})} />`}
    </form>
  </section>`;
}
