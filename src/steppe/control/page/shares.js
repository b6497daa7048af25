// Where the time goes, and how old the experience is that the learner gets: shares as bars with their numbers beside them.

import { html } from "./vendor/htm-preact.js";
import { count, number, percent } from "./words.js";

const WAITING = ["wait", "blocked"];
const WORDS = { wait: "waits", blocked: "blocked", env: "environment", policy: "choosing actions", learn: "learning", sample: "sampling", remember: "storing", publish: "publishing", merge: "merging", other: "other" };

function Role({ role, shares }) {
  const parts = Object.entries(shares).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]);
  return html`<div class="role"><h3>${role}</h3>
    <div class="stack" aria-hidden="true">${parts.map(([phase, share], index) => html`<span key=${phase} class=${WAITING.includes(phase) ? "idle" : `busy b${index % 4}`} style=${{ width: `${100 * share}%` }}></span>`)}</div>
    <ul>${parts.map(([phase, share], index) => html`<li key=${phase}><span class=${`dot ${WAITING.includes(phase) ? "idle" : `busy b${index % 4}`}`} aria-hidden="true"></span>${WORDS[phase] || phase} <b>${percent(share)}</b></li>`)}</ul>
  </div>`;
}

export function Shares({ finding }) {
  const roles = Object.entries(finding?.shares || {});
  const sentence = finding?.sentence;
  return html`<h2>Where the time goes</h2>
    ${sentence && html`<p class="finding" data-rule=${finding.rule}>${sentence[0].toUpperCase() + sentence.slice(1)}.</p>`}
    ${roles.length ? html`<div class="roles">${roles.map(([role, shares]) => html`<${Role} key=${role} role=${role} shares=${shares} />`)}</div>` : html`<p class="nothing">Nothing measured yet.</p>`}`;
}

export function Lags({ lags, mean }) {
  const rows = Object.entries(lags || {}).map(([lag, segments]) => [Number(lag), segments]).sort((a, b) => a[0] - b[0]);
  const all = rows.reduce((sum, row) => sum + row[1], 0);
  const most = rows.reduce((top, row) => Math.max(top, row[1]), 0);
  const now = mean.length ? mean[mean.length - 1][2] : null;
  return html`<h2>Policy lag <b class="now">${number(now)}</b></h2>
    ${rows.length ? html`<table class="bars"><caption class="unseen">How many versions old segments were when they were learned from</caption>
      <thead class="unseen"><tr><th scope="col">versions behind</th><th scope="col">share</th><th scope="col">segments</th></tr></thead>
      <tbody>${rows.slice(0, 12).map(([lag, segments]) => html`<tr key=${lag}><th scope="row">${lag}</th>
        <td><span class="barlet" style=${{ width: `${(100 * segments) / most}%` }}></span><span class="unseen">${percent(segments / all)}</span></td><td class="amount">${count(segments)}</td></tr>`)}</tbody></table>
      <p class="sub">versions behind → segments</p>` : html`<p class="nothing">No segment has been learned from yet.</p>`}`;
}
