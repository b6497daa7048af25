// One run: its progress, its bottleneck, and all operations on it.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { Actors } from "./actors.js";
import { post, remove } from "./api.js";
import { Chart } from "./chart.js";
import { Curves } from "./curves.js";
import { Evaluations } from "./evaluations.js";
import { state } from "./live.js";
import { Logs } from "./logs.js";
import { Confirm, State, go, performOperation, useLive, usePolled, useShortcuts, useTail } from "./parts.js";
import { Lags, Shares } from "./shares.js";
import { Tuning } from "./tuning.js";
import { LIVE, count, duration, formatValue, number, short, withSpaces } from "./format.js";

const FIRST_CURVES = ["train/return_mean", "time/steps_per_s", "train/updates"];
const SHOWN_CURVES = /^(train.(return_mean|updates)|time.steps_per_s|lag.mean|loss.+|memory.samples_per_insert|custom.+)$/;

function useCurves(id) {
  const [revision, redraw] = useReducer((n) => n + 1, 0);
  const [curves, setCurves] = useState(null);
  useEffect(() => {
    let scheduled = false;
    const changed = () => {
      if (scheduled) return;
      scheduled = true;
      requestAnimationFrame(() => {
        scheduled = false;
        redraw();
      });
    };
    const loaded = new Curves(id, (name) => SHOWN_CURVES.test(name), changed);
    setCurves(loaded);
    const load = () => loaded.load(FIRST_CURVES).catch(() => {
      if (!loaded.closed) setTimeout(load, 2000); // the banner shows that the service does not answer
    });
    load();
    return () => loaded.close();
  }, [id]);
  return [curves, revision];
}

const isMark = (event) => event.kind === "command" && event.details.obeyed && event.details.command === "set";

function marksOf(events, curves) {
  return events.map((event) => {
    const { values = {}, live = [], env_steps } = event.details;
    const suffix = (name) => (live.includes(name) ? "" : " (on restart)");
    const changes = Object.entries(values).map(([name, value]) => `${name} → ${formatValue(value)}${suffix(name)}`);
    return { at: env_steps ?? curves.stepsAt(event.time_s) ?? 0, label: changes.join(", ") };
  });
}

function Facts({ run, since }) {
  const { progress } = run;
  const share = progress.total_steps ? progress.env_steps / progress.total_steps : null;
  const facts = [
    ["return", number(progress.train_return_mean), "last 100 episodes"],
    ["evaluation", number(progress.eval_return_mean), "mean of the newest"],
    ["steps", short(progress.env_steps), share === null ? "" : `of ${short(progress.total_steps)}`],
    ["steps/s", short(progress.steps_per_s), ""],
    ["updates", short(progress.updates), `version ${count(progress.version)}`],
    ["time", since ?? "–", "since the start"],
  ];
  return html`<dl class="facts">${facts.map(([name, value, more]) => html`<div key=${name}>
    <dt>${name}</dt><dd data-fact=${name}>${value}</dd><dd class="sub">${more}</dd></div>`)}</dl>`;
}

function Buttons({ run, ask, toggle }) {
  const active = ["RUNNING", "PAUSED"].includes(run.state);
  const ended = !LIVE.includes(run.state);
  const waiting = run.state === "PENDING" && run.desired === "waiting";
  const startable = waiting || (ended && run.state !== "SUCCEEDED");
  const start = () => performOperation(ended ? "Resuming" : "Starting", () => post(`/runs/${run.id}/start`));
  const askFromMenu = (kind) => (event) => {
    event.currentTarget.closest("details").open = false;
    ask(kind);
  };
  return html`<div class="row buttons">
    ${active && html`<button onClick=${toggle}>${run.state === "PAUSED" ? "Resume" : "Pause"}</button>`}
    ${!ended && html`<button class="danger" onClick=${() => ask("stop")}>Stop</button>`}
    ${startable && html`<button class="primary" onClick=${start}>${ended ? "Resume" : "Start"}</button>`}
    <details class="menu"><summary class="button" aria-label="More">⋯</summary><div>
      <a class="button" href=${`#/new?from=${run.id}`}>Start a similar run</a>
      <button disabled=${ended || waiting} onClick=${askFromMenu("kill")}>Kill</button>
      <button disabled=${!ended && !waiting} onClick=${askFromMenu("delete")}>Delete</button>
    </div></details>
  </div>`;
}

const CONFIRMATIONS = {
  stop: ["Stop this run?", "Stop", "It writes a checkpoint and can be resumed later. If it does not stop within 30 s, it is killed."],
  kill: ["Kill this run?", "Kill", "It ends immediately, without a checkpoint: its progress since the last checkpoint is lost."],
  delete: ["Delete this run?", "Delete", "Weights, curves, logs and videos are removed. This cannot be undone."],
};

function Confirmation({ kind, run, onClose }) {
  const [title, yes, consequences] = CONFIRMATIONS[kind];
  const act = async () => {
    if (kind !== "delete") return performOperation(kind === "stop" ? "Stopping" : "Killing", () => post(`/runs/${run.id}/${kind}`));
    go("/");
    return performOperation(`Deleting ${run.id}`, () => remove(`/runs/${run.id}`));
  };
  return html`<${Confirm} title=${title} yes=${yes} onYes=${act} onClose=${onClose}>
    <p><b>${run.id}</b></p><p>${consequences}</p><//>`;
}

const Card = ({ name, wide = false, children }) =>
  html`<section class=${wide ? "card wide" : "card"} aria-label=${name}>${children}</section>`;

function SamplesPerInsert({ points, algo, started, revision }) {
  if (points.length) {
    const line = { label: "samples per stored step", points, color: 3 };
    return html`<${Chart} title="Samples per insert" revision=${revision} lines=${[line]} height=${170} />`;
  }
  const text = started ? `${algo} has no replay buffer: it learns once from each segment.` : "No measurements yet.";
  return html`<h2>Samples per insert</h2><p class="nothing">${text}</p>`;
}

function Plots({ curves, revision, marks, run, diagnosis, evaluations }) {
  const of = (name) => curves.series.get(name) || [];
  const statistics = curves.names.filter((name) => /^(loss|custom)./.test(name));
  const returns = [
    { label: "training", points: of("train/return_mean"), color: 0 },
    { label: "evaluation", points: evaluations.map((one) => [one.env_steps, one.time_s, one.return_mean]), color: 1, dots: true },
  ];
  const speed = { label: "steps/s", points: of("time/steps_per_s"), color: 2 };
  const Small = (name) => {
    const label = name.slice(name.indexOf("/") + 1);
    return html`<${Chart} key=${name} small=${true} title=${withSpaces(label)} revision=${revision} height=${120}
      lines=${[{ label, points: of(name), color: 4 }]} />`;
  };
  return html`<div class="plots">
    <${Card} name="Return" wide><${Chart} title="Return" revision=${revision} marks=${marks} height=${260} lines=${returns}
      hint="No episode has finished yet." /><//>
    <${Card} name="Speed"><${Chart} title="Steps per second" revision=${revision} lines=${[speed]} height=${170} /><//>
    <${Card} name="Policy lag"><${Lags} lags=${diagnosis?.lags} mean=${of("lag/mean")} /><//>
    <${Card} name="Samples per insert"><${SamplesPerInsert} points=${of("memory/samples_per_insert")} algo=${run.algo}
      started=${statistics.length > 0} revision=${revision} /><//>
    <${Card} name="Time" wide><${Shares} diagnosis=${diagnosis} /><//>
    <${Card} name="Losses" wide><h2>Losses and statistics of the learner</h2>
      <div class="smalls">${statistics.map(Small)}
        ${!statistics.length && html`<p class="nothing">The learner has not reported any yet.</p>`}</div><//>
  </div>`;
}

export function RunView({ id }) {
  useLive();
  const run = state.runs.get(id);
  const live = Boolean(run && LIVE.includes(run.state));
  const [curves, revision] = useCurves(id);
  const [confirmation, setConfirmation] = useState(null);
  const diagnosis = usePolled(`/runs/${id}/diagnosis`, live);
  const events = useTail(`/runs/${id}/events`, "events", live, isMark);
  const evaluations = useTail(`/runs/${id}/evaluations`, "evaluations", live);
  const scale = useRef(null);
  useEffect(() => {
    document.title = `${id} · Steppe`;
  }, [id]);
  const toggle = () => {
    const action = state.runs.get(id)?.state === "PAUSED" ? "resume" : "pause";
    return performOperation(action === "pause" ? "Pausing" : "Resuming", () => post(`/runs/${id}/${action}`));
  };
  const scrollTo = (section) => () => {
    const element = document.getElementById(section);
    element?.scrollIntoView({ block: "start" });
    element?.querySelector("input, select, button, [tabindex]")?.focus();
  };
  useShortcuts({
    "+": () => scale.current?.(1), "=": () => scale.current?.(1), "-": () => scale.current?.(-1),
    p: () => ["RUNNING", "PAUSED"].includes(run?.state) && toggle(), s: () => live && setConfirmation("stop"), h: scrollTo("tuning"), l: scrollTo("logs"),
  });
  if (!state.loaded) return html`<p class="loading">Loading ${id} …</p>`;
  if (!run) {
    return html`<section class="empty"><h1>No such run</h1><p>The run ${id} does not exist, or it was deleted.</p>
      <a class="button" href="#/">All runs</a></section>`;
  }
  const until = live ? Date.now() / 1000 : run.heartbeat_s || run.started_s;
  const since = run.started_s ? duration(until - run.started_s) : null;
  return html`<article class="run">
    <div class="head"><div><p class="crumbs">${run.env} · ${run.algo}</p><h1>${id}</h1></div>
      <${State} state=${run.state} /><${Buttons} run=${run} ask=${setConfirmation} toggle=${toggle} /></div>
    ${run.message && run.state !== "RUNNING" && html`<p class=${`reason ${run.state.toLowerCase()}`}>${run.message}</p>`}
    ${run.damage && html`<p class="reason failed">${run.damage}</p>`}
    <${Facts} run=${run} since=${since} />
    <div class="columns">
      ${curves && html`<${Plots} curves=${curves} revision=${revision} marks=${marksOf(events, curves)} run=${run}
        diagnosis=${diagnosis} evaluations=${evaluations} />`}
      <div class="side">
        <${Actors} run=${run} live=${live} scaler=${scale} />
        <${Tuning} run=${run} />
        <${Evaluations} run=${run} evaluations=${evaluations} />
      </div>
    </div>
    <${Logs} run=${run} />
    ${confirmation && html`<${Confirmation} kind=${confirmation} run=${run} onClose=${() => setConfirmation(null)} />`}
  </article>`;
}
