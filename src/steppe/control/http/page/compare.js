// Several runs in one chart: one of their curves, over steps or over the time since the start of each run.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { metrics } from "./api.js";
import { Chart, lineColor } from "./chart.js";
import { state } from "./live.js";
import { State, useLive, usePolling } from "./parts.js";
import { count, number, short } from "./format.js";

const POINTS = 600;
const POLL_MS = 3000;
const HEADS = ["Run", "State", "Return", "Evaluation", "Steps", "Steps/s"];

function Row({ run, index }) {
  const { progress } = run;
  return html`<tr>
    <th scope="row"><span class="dot" style=${{ background: lineColor(index) }} aria-hidden="true"></span>
      <a href=${`#/run/${run.id}`}>${run.id}</a><span class="about">${run.env} · ${run.algo}</span></th>
    <td class="word"><${State} state=${run.state} /></td>
    <td>${number(progress.train_return_mean)}</td><td>${number(progress.eval_return_mean)}</td>
    <td>${count(progress.env_steps)}</td><td>${short(progress.steps_per_s)}</td>
  </tr>`;
}

// A curve of a run and the names of all its curves; only the names if it has no such curve.
const curveOf = (id, name) =>
  metrics(id, { series: [name], points: POINTS })
    .catch(() => metrics(id, { points: 2 }).then((found) => ({ ...found, series: [] })))
    .catch(() => null);

// One curve of every run, polled, and the names of the curves that any of them has.
function useCurves(ids, name) {
  const [curves, setCurves] = useState({});
  const [names, setNames] = useState([]);
  const begin = () => {
    setCurves({});
    return async (obsolete) => {
      const found = await Promise.all(ids.map((id) => curveOf(id, name)));
      if (obsolete()) return;
      setNames([...new Set(found.flatMap((one) => one?.names || []))].sort());
      setCurves(Object.fromEntries(ids.map((id, index) => [id, found[index]?.series[0]?.points || []])));
    };
  };
  usePolling(begin, true, POLL_MS, [ids.join(), name]);
  return [curves, names];
}

function lineOf(id, index, known, over) {
  const points = known.filter((point, i) => i === 0 || point[0] >= known[i - 1][0]);
  const start = state.runs.get(id)?.started_s ?? points[0]?.[1] ?? 0;
  return { label: id, color: index, points: over === "steps" ? points : points.map((p) => [p[1] - start, p[1], p[2]]) };
}

export function Compare({ ids }) {
  useLive();
  const [name, setName] = useState("train/return_mean");
  const [over, setOver] = useState("steps");
  const [curves, names] = useCurves(ids, name);
  useEffect(() => {
    document.title = "Compare · Steppe";
  }, []);
  const lines = ids.map((id, index) => lineOf(id, index, curves[id] || [], over));
  return html`<section class="compare">
    <div class="head"><h1>Compare</h1>
      <label class="inline">curve
        <select value=${name} onChange=${(event) => setName(event.target.value)}>
          ${[...new Set([name, ...names])].map((one) => html`<option value=${one}>${one}</option>`)}
        </select></label>
      <label class="inline">over
        <select value=${over} onChange=${(event) => setOver(event.target.value)}>
          <option value="steps">steps</option><option value="s">seconds</option>
        </select></label>
    </div>
    <div class="card"><${Chart} title=${name} lines=${lines} height=${380} revision=${curves} xLabel=${over}
      hint="None of these runs has this curve." /></div>
    <div class="scroll" tabindex="0" role="region" aria-label="Compared runs"><table class="list numbers">
      <thead><tr>${HEADS.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
      <tbody>${ids.map((id, index) => state.runs.has(id) && html`<${Row} key=${id} run=${state.runs.get(id)} index=${index} />`)}</tbody>
    </table></div>
  </section>`;
}
