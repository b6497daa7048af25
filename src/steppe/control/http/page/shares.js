// Where the time goes, and how old the experience is that the learner gets: bars with their numbers beside them.

import { html } from "./vendor/htm-preact.js";
import { count, number, percent } from "./words.js";

const LEAST = 0.005; // of a role's time; less is not worth a word
const ROWS = 12;
const WAITING = ["wait", "blocked"];
const WORDS = {
  wait: "waits", env: "environment", policy: "choosing actions", learn: "learning", sample: "sampling",
  remember: "storing", publish: "publishing", merge: "merging",
};

function Role({ role, shares }) {
  const parts = Object.entries(shares).filter(([, share]) => share >= LEAST).sort((a, b) => b[1] - a[1]);
  const look = (phase, index) => (WAITING.includes(phase) ? "idle" : `b${index % 4}`);
  const Bar = ([phase, share], index) =>
    html`<span key=${phase} class=${look(phase, index)} style=${{ width: `${100 * share}%` }}></span>`;
  const Word = ([phase, share], index) => html`<li key=${phase}>
    <span class=${`dot ${look(phase, index)}`} aria-hidden="true"></span>${WORDS[phase] || phase} <b>${percent(share)}</b>
  </li>`;
  return html`<div class="role"><h3>${role}</h3>
    <div class="stack" aria-hidden="true">${parts.map(Bar)}</div><ul>${parts.map(Word)}</ul></div>`;
}

export function Shares({ finding }) {
  const roles = Object.entries(finding?.shares || {});
  const sentence = finding?.sentence;
  return html`<h2>Where the time goes ${finding && html`<span class="sub">over ${finding.window}</span>`}</h2>
    ${sentence && html`<p class="finding" data-rule=${finding.rule}>${sentence[0].toUpperCase() + sentence.slice(1)}.</p>`}
    ${roles.length > 0 && html`<div class="roles">
      ${roles.map(([role, shares]) => html`<${Role} key=${role} role=${role} shares=${shares} />`)}</div>`}
    ${!roles.length && html`<p class="nothing">Nothing measured yet.</p>`}`;
}

function Histogram({ rows }) {
  const all = rows.reduce((sum, row) => sum + row[1], 0);
  const most = rows.reduce((top, row) => Math.max(top, row[1]), 0);
  const Row = ([lag, segments]) => html`<tr key=${lag}>
    <th scope="row">${lag}</th>
    <td><span class="barlet" style=${{ width: `${(100 * segments) / most}%` }}></span>
      <span class="unseen">${percent(segments / all)}</span></td>
    <td class="amount">${count(segments)}</td>
  </tr>`;
  return html`<table class="bars">
    <caption class="unseen">How many versions old segments were when they were learned from</caption>
    <thead class="unseen"><tr>
      <th scope="col">versions behind</th><th scope="col">share</th><th scope="col">segments</th>
    </tr></thead>
    <tbody>${rows.slice(0, ROWS).map(Row)}</tbody>
  </table><p class="sub">versions behind → segments</p>`;
}

export function Lags({ lags, mean }) {
  const rows = Object.entries(lags || {}).map(([lag, segments]) => [Number(lag), segments]).sort((a, b) => a[0] - b[0]);
  const now = mean.length ? mean[mean.length - 1][2] : null;
  return html`<h2>Policy lag <b class="now">${number(now)}</b></h2>
    ${rows.length > 0 && html`<${Histogram} rows=${rows} />`}
    ${!rows.length && html`<p class="nothing">No segment has been learned from yet.</p>`}`;
}
