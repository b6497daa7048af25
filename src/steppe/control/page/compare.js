// Several runs in one chart: any curve that they have, over steps or over time since each began.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { metrics } from "./api.js";
import { Chart, ink } from "./chart.js";
import { state } from "./live.js";
import { State, useLive } from "./parts.js";
import { count, number, short } from "./words.js";

const POINTS = 600;
const EVERY_MS = 3000;

export function Compare({ ids }) {
  useLive();
  const [name, setName] = useState("train/return_mean");
  const [over, setOver] = useState("steps");
  const [curves, setCurves] = useState({});
  const [names, setNames] = useState([name]);
  useEffect(() => {
    document.title = "Compare · Steppe";
  }, []);
  useEffect(() => {
    let gone = false;
    let timer = 0;
    const look = async () => {
      const known = new Set();
      await Promise.all(ids.map(async (id) => {
        const found = await metrics(id, { series: [name], points: POINTS }).catch(() => null);
        if (gone || !found) return;
        found.names.forEach((one) => known.add(one));
        setCurves((now) => ({ ...now, [id]: found.series[0].points }));
      }));
      if (gone) return;
      setNames([...known].sort());
      timer = setTimeout(look, EVERY_MS);
    };
    setCurves({});
    look();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [ids.join(), name]);
  const lines = ids.map((id, index) => {
    const points = (curves[id] || []).filter((point, i, all) => i === 0 || point[0] >= all[i - 1][0]);
    const begin = state.runs.get(id)?.started_s ?? points[0]?.[1] ?? 0;
    return { label: id, ink: index, points: over === "steps" ? points : points.map((p) => [p[1] - begin, p[1], p[2]]) };
  });
  return html`<section class="compare"><div class="head"><h1>Compare</h1>
      <label class="inline">curve <select value=${name} onChange=${(event) => setName(event.target.value)}>${[...new Set([name, ...names])].map((one) => html`<option value=${one}>${one}</option>`)}</select></label>
      <label class="inline">over <select value=${over} onChange=${(event) => setOver(event.target.value)}><option value="steps">steps</option><option value="s">seconds</option></select></label></div>
    <div class="card"><${Chart} title=${name} lines=${lines} height=${380} stamp=${curves} xLabel=${over} hint="None of them has this curve." /></div>
    <div class="scroll" tabindex="0" role="region" aria-label="Compared runs"><table class="list numbers"><thead><tr><th scope="col">Run</th><th scope="col">State</th><th scope="col">Return</th><th scope="col">Evaluation</th><th scope="col">Steps</th><th scope="col">Steps/s</th></tr></thead><tbody>
      ${ids.map((id, index) => ({ id, index, run: state.runs.get(id) })).filter(({ run }) => run).map(({ id, index, run }) => html`<tr key=${id}><th scope="row"><span class="dot" style=${{ background: ink(index) }} aria-hidden="true"></span><a href=${`#/run/${id}`}>${id}</a><span class="about">${run.env} · ${run.algo}</span></th>
        <td class="word"><${State} state=${run.state} /></td><td>${number(run.progress.train_return_mean)}</td><td>${number(run.progress.eval_return_mean)}</td><td>${count(run.progress.env_steps)}</td><td>${short(run.progress.steps_per_s)}</td></tr>`)}
    </tbody></table></div></section>`;
}
