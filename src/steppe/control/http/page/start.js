// The form that starts a run. Its fields are generated from the API's schema.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { get, post } from "./api.js";
import { Field, parse } from "./fields.js";
import * as live from "./live.js";
import { go, notify } from "./parts.js";
import { formatValue } from "./format.js";

const MAIN_FIELDS = ["actors", "mode", "steps", "target_return", "seed", "name"];
const OWN_WIDGETS = ["env", "algo", "agent", "start"];
const SECTIONS = { environment: "Environment", flow: "Flow", evaluation: "Evaluation", checkpoint: "Checkpoints" };
// Initial values that suit observing and scaling a run; all other fields keep the defaults of the schema.
const INITIAL = { env: "CartPole-v1", algo: "ppo", mode: "async", actors: "2", "evaluation.record": "true" };

async function load() {
  const paths = ["/openapi.json", "/environments", "/algorithms", "/version"];
  const [openapi, environments, algorithms, version] = await Promise.all(paths.map(get));
  const schemas = openapi.components.schemas;
  const propertiesOf = (ref) => schemas[ref.split("/").pop()].properties;
  const request = { ...schemas.RunRequest.properties };
  request.runtime = { ...request.runtime, anyOf: [{ type: "string", enum: version.runtimes }, { type: "null" }] };
  const sections = Object.keys(SECTIONS).map((name) => [name, propertiesOf(request[name].$ref)]);
  return { request, sections, environments: environments.environments, algorithms: algorithms.algorithms };
}

// Convert flat dotted values of the form to the body of a request; return also the errors by key.
function toRequest(values, schemaOf) {
  const request = { agent: {} };
  const errors = {};
  for (const [key, text] of Object.entries(values)) {
    const schema = schemaOf(key);
    if (!schema || text === "") continue;
    try {
      const value = parse(schema, text);
      const [section, name] = key.split(".");
      if (name) (request[section] ||= {})[name] = value;
      else request[key] = value;
    } catch (error) {
      errors[key] = error.message;
    }
  }
  return { request, errors };
}

function Section({ title, fields, note }) {
  return html`<details class="section">
    <summary><h2>${title}</h2><span class="sub">${note}</span></summary><div class="fields">${fields}</div></details>`;
}

const fieldId = (key) => `f-${key.replace(".", "-")}`;

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
  const onInput = (key) => (event) => set(key)(event.target.value);
  const field = (key, name, schema, description = schema.description) => html`<${Field} key=${key} id=${fieldId(key)} name=${name}
    schema=${schema} description=${description} value=${values[key] || ""} error=${errors[key]} onChange=${set(key)} />`;
  const requestField = (name) => field(name, name, known.request[name]);
  const submit = async (event) => {
    event.preventDefault();
    const { request, errors: found } = toRequest(values, schemaOf);
    if (!request.env) found.env = "An environment is required";
    setErrors(found);
    const first = Object.keys(found)[0];
    if (first) {
      notify(`${first}: ${found[first]}`, { error: true, persistent: false });
      const input = document.getElementById(fieldId(first));
      input?.closest("details")?.setAttribute("open", "");
      return input?.focus();
    }
    setBusy(true);
    try {
      const run = await post("/runs", request);
      live.state.runs.set(run.id, run); // the stream may send it later
      go(`/run/${run.id}`);
    } catch (problem) {
      notify(problem.message, { error: true });
      setBusy(false);
    }
    return undefined;
  };
  const others = Object.keys(known.request).filter((name) => ![...MAIN_FIELDS, ...OWN_WIDGETS, ...Object.keys(SECTIONS)].includes(name));
  return html`<form class="start" onSubmit=${submit} novalidate>
    <div class="head"><h1>Start a run</h1></div>
    <div class="choices">
      <div class=${`field ${errors.env ? "wrong" : ""}`}><label for="f-env">environment</label>
        <input id="f-env" list="environments" value=${values.env} autocomplete="off" spellcheck=${false}
          aria-describedby="f-env-about" onInput=${onInput("env")} />
        <datalist id="environments">${known.environments.map((one) => html`<option value=${one.id} />`)}</datalist>
        <p id="f-env-about" class="about">${environment ? about(environment) : "Type to search the list of ids."}</p>
      </div>
      <div class="field"><label for="f-algo">algorithm</label>
        <select id="f-algo" value=${values.algo} aria-describedby="f-algo-about" onChange=${onInput("algo")}>
          ${known.algorithms.map((one) => html`<option value=${one.name}>${one.name}</option>`)}</select>
        <p id="f-algo-about" class="about">${algorithm?.summary}</p></div>
    </div>
    <div class="fields">${MAIN_FIELDS.map(requestField)}</div>
    <${Section} title="Hyperparameters" note=${`${tunable.length} of ${values.algo}; an empty field keeps the default`}
      fields=${tunable.map((one) => field(`agent.${one.name}`, one.name, one.schema, one.description))} />
    ${known.sections.map(([name, schemas]) => html`<${Section} key=${name} title=${SECTIONS[name]}
      fields=${Object.entries(schemas).map(([inner, schema]) => field(`${name}.${inner}`, inner, schema))} />`)}
    <${Section} title="More" fields=${others.map(requestField)} />
    <div class="row">
      <button class="primary" type="submit" disabled=${busy}>${busy ? "Starting …" : "Start"}</button>
      <a class="button" href="#/">Cancel</a>
    </div>
  </form>`;
}

function about(environment) {
  const parts = [];
  if (environment.solved_at !== null) parts.push(`solved at ${environment.solved_at}`);
  if (environment.max_episode_steps) parts.push(`${environment.max_episode_steps} steps per episode`);
  if (environment.needs) parts.push(`needs ${environment.needs}, which is not installed`);
  return parts.join("; ") || "Type to search the list of ids.";
}

// The values that were requested for another run, as texts for the form.
function requestedValues(run) {
  const requested = Object.entries(run.sources).filter(([, source]) => source === "request").map(([key]) => key);
  const given = requested.filter((key) => run.config[key] !== null && key !== "name");
  return { env: run.env, algo: run.algo, ...Object.fromEntries(given.map((key) => [key, formatValue(run.config[key])])) };
}

export function Start({ from }) {
  const [known, setKnown] = useState(null);
  const [start, setStart] = useState(from ? null : INITIAL);
  useEffect(() => {
    document.title = "Start a run · Steppe";
    load().then(setKnown, (problem) => notify(problem.message, { error: true }));
    if (from) get(`/runs/${from}`).then((run) => setStart(requestedValues(run)), () => setStart(INITIAL));
  }, [from]);
  if (!known || !start) return html`<p class="loading">Loading environments and algorithms …</p>`;
  return html`<${Form} known=${known} start=${start} />`;
}
