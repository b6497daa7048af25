// Hyperparameters of a run: edit values, preview when each takes effect, and apply them together.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { get, patch } from "./api.js";
import { Field, parse } from "./fields.js";
import { performOperation } from "./parts.js";
import { formatValue, withSpaces } from "./format.js";

const DEBOUNCE_MS = 250; // after the last key
const GROUPS = { live: "take effect with the next update", restart: "take effect on restart", fixed: "are fixed" };

function Values({ list }) {
  return html`<dl class="values">${list.map((one) => html`<div key=${one.name}>
    <dt>${withSpaces(one.name)}</dt><dd data-value=${one.name}>${formatValue(one.value)}</dd></div>`)}</dl>`;
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
      <b>${withSpaces(one.name)}</b> ${formatValue(one.before)} → ${formatValue(one.after)}, ${one.effect}</li>`)}</ul>
    <div class="row"><button class="primary" type="submit" disabled=${!ready}>Apply</button>
      <button type="button" onClick=${onDiscard}>Discard</button></div>
  </div>`;
}

// Parse the typed texts; return the values and the errors by name.
function parseAll(known, typed) {
  const values = {};
  const errors = {};
  for (const [name, text] of Object.entries(typed)) {
    if (text === "") continue;
    try {
      values[name] = parse(known.find((one) => one.name === name).schema, text);
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
  const { values, errors } = parseAll(known, typed);
  const names = Object.keys(values);
  const invalid = Object.keys(errors).length > 0;
  useEffect(() => {
    setPlan(null);
    if (!names.length) return undefined;
    const preview = () => patch(path, { values, dry_run: true }).then(setPlan, (problem) => setPlan({ problem: problem.message }));
    const timer = setTimeout(preview, DEBOUNCE_MS);
    return () => clearTimeout(timer);
  }, [JSON.stringify(values), run.state]);
  const apply = async (event) => {
    event.preventDefault();
    if (!names.length || invalid) return;
    if (await performOperation(`Changing ${names.map(withSpaces).join(", ")}`, () => patch(path, { values }))) setTyped({});
    load();
  };
  if (!known) return null;
  const isFixed = (effect) => effect === "fixed" || run.state === "SUCCEEDED";
  const onType = (name, text) => setTyped((now) => ({ ...now, [name]: text }));
  const Group = ([effect, description]) => {
    const list = known.filter((one) => one.effect === effect);
    return list.length > 0 && html`<details key=${effect} class="group" open=${effect === "live"}>
      <summary>${list.length} that ${description}</summary>
      ${isFixed(effect) && html`<${Values} list=${list} />`}
      ${!isFixed(effect) && html`<${Fields} list=${list} typed=${typed} errors=${errors} onType=${onType} />`}
    </details>`;
  };
  return html`<section class="card" id="tuning" aria-label="Hyperparameters"><h2>Hyperparameters</h2>
    <form onSubmit=${apply} novalidate>
      ${Object.entries(GROUPS).map(Group)}
      ${(names.length > 0 || invalid) && html`<${Plan} plan=${plan} ready=${plan?.effects && !invalid} onDiscard=${() => setTyped({})} />`}
    </form>
  </section>`;
}
