// One run: how it goes, what holds it back, and everything that can be asked of it.

import { html, useEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { Actors } from "./actors.js";
import { post, remove } from "./api.js";
import { Chart } from "./chart.js";
import { Curves } from "./curves.js";
import { Evaluations } from "./evaluations.js";
import { state } from "./live.js";
import { Logs } from "./logs.js";
import { Confirm, State, carryOut, go, useKeys, useLive, useLook, useTail } from "./parts.js";
import { Lags, Shares } from "./shares.js";
import { Tuning } from "./tuning.js";
import { LIVE, count, lasting, number, short, shown, spaced } from "./words.js";

const FIRST = ["train/return_mean", "time/steps_per_s", "train/updates"];
const WANTED = /^(train.(return_mean|updates)|time.steps_per_s|lag.mean|loss.+|memory.samples_per_insert|custom.+)$/;

function useCurves(id) {
  const [stamp, again] = useReducer((n) => n + 1, 0);
  const [curves, setCurves] = useState(null);
  useEffect(() => {
    let due = false;
    const changed = () => {
      if (due) return;
      due = true;
      requestAnimationFrame(() => {
        due = false;
        again();
      });
    };
    const made = new Curves(id, (name) => WANTED.test(name), changed);
    setCurves(made);
    const load = () => made.load(FIRST).catch(() => {
      if (!made.closed) setTimeout(load, 2000); // the banner says when the service is away
    });
    load();
    return () => made.close();
  }, [id]);
  return [curves, stamp];
}

const isMark = (event) => event.kind === "command" && event.details.obeyed && event.details.command === "set";

function marksOf(events, curves) {
  return events.map((event) => {
    const { values = {}, live = [], env_steps } = event.details;
    const when = (name) => (live.includes(name) ? "" : " (on restart)");
    const words = Object.entries(values).map(([name, value]) => `${name} → ${shown(value)}${when(name)}`);
    return { at: env_steps ?? curves.stepsAt(event.time_s) ?? 0, word: words.join(", ") };
  });
}

function Facts({ run, since }) {
  const { progress } = run;
  const share = progress.total_steps ? progress.env_steps / progress.total_steps : null;
  const facts = [
    ["return", number(progress.train_return_mean), "last 100 episodes"],
    ["evaluation", number(progress.eval_return_mean), "newest, mean"],
    ["steps", short(progress.env_steps), share === null ? "" : `of ${short(progress.total_steps)}`],
    ["steps/s", short(progress.steps_per_s), ""],
    ["updates", short(progress.updates), `version ${count(progress.version)}`],
    ["time", since ?? "–", "since its start"],
  ];
  return html`<dl class="facts">${facts.map(([name, value, more]) => html`<div key=${name}>
    <dt>${name}</dt><dd data-fact=${name}>${value}</dd><dd class="sub">${more}</dd></div>`)}</dl>`;
}

function Buttons({ run, ask, toggle }) {
  const active = ["RUNNING", "PAUSED"].includes(run.state);
  const ended = !LIVE.includes(run.state);
  const waiting = run.state === "PENDING" && run.desired === "waiting";
  const startable = waiting || (ended && run.state !== "SUCCEEDED");
  const start = () => carryOut(ended ? "Going on" : "Starting", () => post(`/runs/${run.id}/start`));
  const choose = (kind) => (event) => {
    event.currentTarget.closest("details").open = false;
    ask(kind);
  };
  return html`<div class="row buttons">
    ${active && html`<button onClick=${toggle}>${run.state === "PAUSED" ? "Resume" : "Pause"}</button>`}
    ${!ended && html`<button class="danger" onClick=${() => ask("stop")}>Stop</button>`}
    ${startable && html`<button class="primary" onClick=${start}>${ended ? "Go on" : "Start"}</button>`}
    <details class="menu"><summary class="button" aria-label="More">⋯</summary><div>
      <a class="button" href=${`#/new?from=${run.id}`}>Start one like it</a>
      <button disabled=${ended || waiting} onClick=${choose("kill")}>Kill</button>
      <button disabled=${!ended && !waiting} onClick=${choose("delete")}>Delete</button>
    </div></details>
  </div>`;
}

const QUESTIONS = {
  stop: ["Stop this run?", "Stop it", "It writes a checkpoint first and can go on from there later. After 30 s it is killed."],
  kill: ["Kill this run?", "Kill it", "It ends at once, without a checkpoint: what it learned since the last one is lost."],
  delete: ["Delete this run?", "Delete it", "Weights, curves, logs and films are removed. This cannot be taken back."],
};

function Question({ kind, run, onClose }) {
  const [title, yes, words] = QUESTIONS[kind];
  const act = async () => {
    if (kind !== "delete") return carryOut(kind === "stop" ? "Stopping" : "Killing", () => post(`/runs/${run.id}/${kind}`));
    go("/");
    return carryOut(`Deleting ${run.id}`, () => remove(`/runs/${run.id}`));
  };
  const no = kind === "delete" ? "Keep it" : "Let it run";
  return html`<${Confirm} title=${title} yes=${yes} no=${no} onYes=${act} onClose=${onClose}>
    <p><b>${run.id}</b></p><p>${words}</p><//>`;
}

const Card = ({ name, wide = false, children }) =>
  html`<section class=${wide ? "card wide" : "card"} aria-label=${name}>${children}</section>`;

function Drawn({ points, algo, begun, stamp }) {
  if (points.length) {
    const line = { label: "drawn per step stored", points, ink: 3 };
    return html`<${Chart} title="Samples per insert" stamp=${stamp} lines=${[line]} height=${170} />`;
  }
  const words = begun ? `${algo} learns from each segment as it comes and keeps no memory to draw from.` : "Nothing measured yet.";
  return html`<h2>Samples per insert</h2><p class="nothing">${words}</p>`;
}

function Plots({ curves, stamp, marks, run, finding, judged }) {
  const of = (name) => curves.series.get(name) || [];
  const statistics = curves.names.filter((name) => /^(loss|custom)./.test(name));
  const returns = [
    { label: "training", points: of("train/return_mean"), ink: 0 },
    { label: "evaluation", points: judged.map((one) => [one.env_steps, one.time_s, one.return_mean]), ink: 1, dots: true },
  ];
  const speed = { label: "steps/s", points: of("time/steps_per_s"), ink: 2 };
  const Small = (name) => {
    const label = name.slice(name.indexOf("/") + 1);
    return html`<${Chart} key=${name} small=${true} title=${spaced(label)} stamp=${stamp} height=${120}
      lines=${[{ label, points: of(name), ink: 4 }]} />`;
  };
  return html`<div class="plots">
    <${Card} name="Return" wide><${Chart} title="Return" stamp=${stamp} marks=${marks} height=${260} lines=${returns}
      hint="The first episodes are under way." /><//>
    <${Card} name="Speed"><${Chart} title="Steps per second" stamp=${stamp} lines=${[speed]} height=${170} /><//>
    <${Card} name="Policy lag"><${Lags} lags=${finding?.lags} mean=${of("lag/mean")} /><//>
    <${Card} name="Samples per insert"><${Drawn} points=${of("memory/samples_per_insert")} algo=${run.algo}
      begun=${statistics.length > 0} stamp=${stamp} /><//>
    <${Card} name="Time" wide><${Shares} finding=${finding} /><//>
    <${Card} name="Losses" wide><h2>Losses and statistics of the learner</h2>
      <div class="smalls">${statistics.map(Small)}
        ${!statistics.length && html`<p class="nothing">The learner has not reported yet.</p>`}</div><//>
  </div>`;
}

export function RunView({ id }) {
  useLive();
  const run = state.runs.get(id);
  const live = Boolean(run && LIVE.includes(run.state));
  const [curves, stamp] = useCurves(id);
  const [question, setQuestion] = useState(null);
  const finding = useLook(`/runs/${id}/diagnosis`, live);
  const events = useTail(`/runs/${id}/events`, "events", live, isMark);
  const judged = useTail(`/runs/${id}/evaluations`, "evaluations", live);
  const scale = useRef(null);
  useEffect(() => {
    document.title = `${id} · Steppe`;
  }, [id]);
  const toggle = () => {
    const word = state.runs.get(id)?.state === "PAUSED" ? "resume" : "pause";
    return carryOut(word === "pause" ? "Pausing" : "Resuming", () => post(`/runs/${id}/${word}`));
  };
  const to = (place) => () => {
    const found = document.getElementById(place);
    found?.scrollIntoView({ block: "start" });
    found?.querySelector("input, select, button, [tabindex]")?.focus();
  };
  useKeys({
    "+": () => scale.current?.(1), "=": () => scale.current?.(1), "-": () => scale.current?.(-1),
    p: () => ["RUNNING", "PAUSED"].includes(run?.state) && toggle(), s: () => live && setQuestion("stop"), h: to("tuning"), l: to("logs"),
  });
  if (!state.known) return html`<p class="loading">Looking for ${id} …</p>`;
  if (!run) {
    return html`<section class="empty"><h1>No such run</h1><p>There is no run ${id}, or it was deleted.</p>
      <a class="button" href="#/">All runs</a></section>`;
  }
  const until = live ? Date.now() / 1000 : run.heartbeat_s || run.started_s;
  const since = run.started_s ? lasting(until - run.started_s) : null;
  return html`<article class="run">
    <div class="head"><div><p class="crumbs">${run.env} · ${run.algo}</p><h1>${id}</h1></div>
      <${State} state=${run.state} /><${Buttons} run=${run} ask=${setQuestion} toggle=${toggle} /></div>
    ${run.message && run.state !== "RUNNING" && html`<p class=${`reason ${run.state.toLowerCase()}`}>${run.message}</p>`}
    ${run.damage && html`<p class="reason failed">${run.damage}</p>`}
    <${Facts} run=${run} since=${since} />
    <div class="columns">
      ${curves && html`<${Plots} curves=${curves} stamp=${stamp} marks=${marksOf(events, curves)} run=${run}
        finding=${finding} judged=${judged} />`}
      <div class="side">
        <${Actors} run=${run} live=${live} scaler=${scale} />
        <${Tuning} run=${run} />
        <${Evaluations} run=${run} judged=${judged} />
      </div>
    </div>
    <${Logs} run=${run} />
    ${question && html`<${Question} kind=${question} run=${run} onClose=${() => setQuestion(null)} />`}
  </article>`;
}
