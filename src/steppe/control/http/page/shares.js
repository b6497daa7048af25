// Shares of time per role, and the policy lag of learned segments, as bars with numbers.

import { html } from "./vendor/htm-preact.js";
import { count, number, percent } from "./format.js";

const MIN_SHARE = 0.005; // smaller shares of a role's time are omitted
const MAX_ROWS = 12;
const WAITING = ["wait", "blocked"];
const PHASES = {
  wait: "waiting", env: "environment", policy: "choosing actions", learn: "learning", sample: "sampling",
  remember: "storing", publish: "publishing", merge: "merging",
};

function Role({ role, shares }) {
  const parts = Object.entries(shares).filter(([, share]) => share >= MIN_SHARE).sort((a, b) => b[1] - a[1]);
  const style = (phase, index) => (WAITING.includes(phase) ? "idle" : `b${index % 4}`);
  const Bar = ([phase, share], index) =>
    html`<span key=${phase} class=${style(phase, index)} style=${{ width: `${100 * share}%` }}></span>`;
  const Legend = ([phase, share], index) => html`<li key=${phase}>
    <span class=${`dot ${style(phase, index)}`} aria-hidden="true"></span>${PHASES[phase] || phase} <b>${percent(share)}</b>
  </li>`;
  return html`<div class="role"><h3>${role}</h3>
    <div class="stack" aria-hidden="true">${parts.map(Bar)}</div><ul>${parts.map(Legend)}</ul></div>`;
}

export function Shares({ diagnosis }) {
  const roles = Object.entries(diagnosis?.shares || {});
  const sentence = diagnosis?.sentence;
  return html`<h2>Time shares ${diagnosis && html`<span class="sub">over ${diagnosis.window}</span>`}</h2>
    ${sentence && html`<p class="finding" data-rule=${diagnosis.rule}>${sentence[0].toUpperCase() + sentence.slice(1)}.</p>`}
    ${roles.length > 0 && html`<div class="roles">
      ${roles.map(([role, shares]) => html`<${Role} key=${role} role=${role} shares=${shares} />`)}</div>`}
    ${!roles.length && html`<p class="nothing">No measurements yet.</p>`}`;
}

function Histogram({ rows }) {
  const total = rows.reduce((sum, row) => sum + row[1], 0);
  const most = rows.reduce((top, row) => Math.max(top, row[1]), 0);
  const Row = ([lag, segments]) => html`<tr key=${lag}>
    <th scope="row">${lag}</th>
    <td><span class="histogram-bar" style=${{ width: `${(100 * segments) / most}%` }}></span>
      <span class="visually-hidden">${percent(segments / total)}</span></td>
    <td class="amount">${count(segments)}</td>
  </tr>`;
  return html`<table class="bars">
    <caption class="visually-hidden">Number of learned segments by policy lag</caption>
    <thead class="visually-hidden"><tr>
      <th scope="col">versions behind</th><th scope="col">share</th><th scope="col">segments</th>
    </tr></thead>
    <tbody>${rows.slice(0, MAX_ROWS).map(Row)}</tbody>
  </table><p class="sub">versions behind → segments</p>`;
}

export function Lags({ lags, mean }) {
  const rows = Object.entries(lags || {}).map(([lag, segments]) => [Number(lag), segments]).sort((a, b) => a[0] - b[0]);
  const now = mean.length ? mean[mean.length - 1][2] : null;
  return html`<h2>Policy lag <b class="now">${number(now)}</b></h2>
    ${rows.length > 0 && html`<${Histogram} rows=${rows} />`}
    ${!rows.length && html`<p class="nothing">No segment has been learned from yet.</p>`}`;
}
