// Start a run: the form is made from the service's own schema, so that what a request may say and what is shown agree.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { get, post } from "./api.js";
import { Field, read } from "./fields.js";
import * as live from "./live.js";
import { go, say } from "./parts.js";
import { shown } from "./words.js";

const FIRST = ["actors", "mode", "steps", "target_return", "seed", "name"];
const ELSEWHERE = ["env", "algo", "agent", "start"];
const SECTIONS = { environment: "Environment", flow: "Flow", evaluation: "Evaluation", checkpoint: "Checkpoints" };
// The page is for watching and scaling, which these are for; everything else keeps the default of the schema.
const BEGIN = { env: "CartPole-v1", algo: "ppo", mode: "async", actors: "2", "evaluation.record": "true" };

async function load() {
  const asked = ["/openapi.json", "/environments", "/algorithms", "/version"].map(get);
  const [contract, environments, algorithms, version] = await Promise.all(asked);
  const schemas = contract.components.schemas;
  const inner = (ref) => schemas[ref.split("/").pop()].properties;
  const request = { ...schemas.RunRequest.properties };
  request.runtime = { ...request.runtime, anyOf: [{ type: "string", enum: version.runtimes }, { type: "null" }] };
  const sections = Object.keys(SECTIONS).map((name) => [name, inner(request[name].$ref)]);
  return { request, sections, environments: environments.environments, algorithms: algorithms.algorithms };
}

// Flat dotted values from the form → the body of a request; errors by key.
function body(values, schemaOf) {
  const made = { agent: {} };
  const errors = {};
  for (const [key, text] of Object.entries(values)) {
    const schema = schemaOf(key);
    if (!schema || text === "") continue;
    try {
      const value = read(schema, text);
      const [section, name] = key.split(".");
      if (name) (made[section] ||= {})[name] = value;
      else made[key] = value;
    } catch (error) {
      errors[key] = error.message;
    }
  }
  return { made, errors };
}

function Section({ title, fields, note }) {
  return html`<details class="section">
    <summary><h2>${title}</h2><span class="sub">${note}</span></summary><div class="fields">${fields}</div></details>`;
}

const placeOf = (key) => `f-${key.replace(".", "-")}`;

function Form({ known, start }) {
  const [values, setValues] = useState(start);
  const [errors, setErrors] = useState({});
  const [busy, setBusy] = useState(false);
  const algorithm = known.algorithms.find((one) => one.name === (values.algo || "ppo"));
  const environment = known.environments.find((one) => one.id === values.env);
  const sections = Object.fromEntries(known.sections);
  const tunable = algorithm?.hyperparameters || [];
  const schemaOf = (key) => {
    const [section, name] = key.split(".");
    if (section === "agent") return tunable.find((one) => one.name === name)?.schema;
    return name ? sections[section]?.[name] : known.request[key];
  };
  const set = (key) => (text) => setValues((now) => ({ ...now, [key]: text }));
  const typed = (key) => (event) => set(key)(event.target.value);
  const field = (key, name, schema, description = schema.description) => html`<${Field} key=${key} id=${placeOf(key)} name=${name}
    schema=${schema} description=${description} value=${values[key] || ""} error=${errors[key]} onChange=${set(key)} />`;
  const asked = (name) => field(name, name, known.request[name]);
  const submit = async (event) => {
    event.preventDefault();
    const { made, errors: wrong } = body(values, schemaOf);
    if (!made.env) wrong.env = "an environment is needed";
    setErrors(wrong);
    const first = Object.keys(wrong)[0];
    if (first) {
      say(`${first}: ${wrong[first]}`, { bad: true, stays: false });
      const place = document.getElementById(placeOf(first));
      place?.closest("details")?.setAttribute("open", "");
      return place?.focus();
    }
    setBusy(true);
    try {
      const run = await post("/runs", made);
      live.state.runs.set(run.id, run); // before the stream has told of it
      go(`/run/${run.id}`);
    } catch (problem) {
      say(problem.message, { bad: true });
      setBusy(false);
    }
    return undefined;
  };
  const others = Object.keys(known.request).filter((name) => ![...FIRST, ...ELSEWHERE, ...Object.keys(SECTIONS)].includes(name));
  return html`<form class="start" onSubmit=${submit} novalidate>
    <div class="head"><h1>Start a run</h1></div>
    <div class="choices">
      <div class=${`field ${errors.env ? "wrong" : ""}`}><label for="f-env">environment</label>
        <input id="f-env" list="environments" value=${values.env} autocomplete="off" spellcheck=${false}
          aria-describedby="f-env-about" onInput=${typed("env")} />
        <datalist id="environments">${known.environments.map((one) => html`<option value=${one.id} />`)}</datalist>
        <p id="f-env-about" class="about">${environment ? about(environment) : "An id from the list: type to search it."}</p>
      </div>
      <div class="field"><label for="f-algo">algorithm</label>
        <select id="f-algo" value=${values.algo} aria-describedby="f-algo-about" onChange=${typed("algo")}>
          ${known.algorithms.map((one) => html`<option value=${one.name}>${one.name}</option>`)}</select>
        <p id="f-algo-about" class="about">${algorithm?.summary}</p></div>
    </div>
    <div class="fields">${FIRST.map(asked)}</div>
    <${Section} title="Hyperparameters" note=${`${tunable.length} of ${values.algo}; empty keeps the default`}
      fields=${tunable.map((one) => field(`agent.${one.name}`, one.name, one.schema, one.description))} />
    ${known.sections.map(([name, schemas]) => html`<${Section} key=${name} title=${SECTIONS[name]}
      fields=${Object.entries(schemas).map(([inner, schema]) => field(`${name}.${inner}`, inner, schema))} />`)}
    <${Section} title="More" fields=${others.map(asked)} />
    <div class="row">
      <button class="primary" type="submit" disabled=${busy}>${busy ? "Starting …" : "Start"}</button>
      <a class="button" href="#/">Cancel</a>
    </div>
  </form>`;
}

function about(environment) {
  const parts = [];
  if (environment.solved_at !== null) parts.push(`solved at ${environment.solved_at}`);
  if (environment.max_episode_steps) parts.push(`${environment.max_episode_steps} steps an episode`);
  if (environment.needs) parts.push(`needs ${environment.needs}, which is missing here`);
  return parts.join("; ") || "An id from the list.";
}

// The settings of another run as what one would have typed, where somebody asked for them.
function likeThat(run) {
  const asked = Object.entries(run.sources).filter(([, source]) => source === "request").map(([key]) => key);
  const typed = asked.filter((key) => run.config[key] !== null && key !== "name");
  return { env: run.env, algo: run.algo, ...Object.fromEntries(typed.map((key) => [key, shown(run.config[key])])) };
}

export function Start({ from }) {
  const [known, setKnown] = useState(null);
  const [start, setStart] = useState(from ? null : BEGIN);
  useEffect(() => {
    document.title = "Start a run · Steppe";
    load().then(setKnown, (problem) => say(problem.message, { bad: true }));
    if (from) get(`/runs/${from}`).then((run) => setStart(likeThat(run)), () => setStart(BEGIN));
  }, [from]);
  if (!known || !start) return html`<p class="loading">Reading what can be learned here …</p>`;
  return html`<${Form} known=${known} start=${start} />`;
}
