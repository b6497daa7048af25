// One chart: uPlot for the eyes, a sentence for screen readers, a table for whoever wants the numbers. Lines differ by
// dash as well as by colour; marks are vertical lines with a word.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { count, number, short, tick } from "./words.js";

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [1, 4], [12, 4], [6, 2, 1, 2]];
const INKS = 8;
const ROWS = 12;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const ink = (index) => `var(--ink-${index % INKS})`;

// A page of fifty charts is drawn a few at a time, so that it can be used meanwhile.
const SLICE_MS = 8;
const waiting = new Set();

function drawSome() {
  const until = performance.now() + SLICE_MS;
  try {
    for (const draw of waiting) {
      waiting.delete(draw);
      draw();
      if (performance.now() > until) break;
    }
  } finally {
    if (waiting.size) requestAnimationFrame(drawSome);
  }
}

// Calls `draw` soon; what comes back takes that back, or is of no effect.
function soon(draw) {
  if (!waiting.size) requestAnimationFrame(drawSome);
  waiting.add(draw);
  return () => waiting.delete(draw);
}

function joined(lines) {
  const tables = lines.map(({ points }) => [points.map((p) => p[0]), points.map((p) => p[2])]);
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}

function fitted(ctx, text, room) {
  let kept = text;
  while (kept && ctx.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
  return ctx.measureText(text).width <= room ? text : `${kept}…`;
}

function markPlugin(marks) {
  return {
    hooks: {
      draw: (u) => {
        const { ctx, bbox } = u;
        ctx.save();
        ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
        for (const mark of marks.current) {
          const x = u.valToPos(mark.at, "x", true);
          if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
          ctx.strokeStyle = ctx.fillStyle = css("--mark");
          ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
          ctx.lineWidth = devicePixelRatio;
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          const right = x > bbox.left + bbox.width / 2;
          const gap = 5 * devicePixelRatio;
          const room = (right ? x - bbox.left : bbox.left + bbox.width - x) - 2 * gap;
          ctx.textAlign = right ? "right" : "left";
          ctx.fillText(fitted(ctx, mark.word, room), x + (right ? -gap : gap), bbox.top + 11 * devicePixelRatio);
        }
        ctx.restore();
      },
    },
  };
}

function options(lines, size, small, xName, marks, hooks) {
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
  const distance = (value) => (xName === "s" ? `${short(value)} s` : short(value));
  const font = "11px system-ui, sans-serif";
  return {
    ...size,
    legend: { show: false },
    cursor: { points: { size: 7 }, drag: { x: true, y: false }, y: false },
    padding: [10, 12, 0, 0],
    scales: { x: { time: false } },
    series: [
      {},
      ...lines.map((line, index) => ({
        label: line.label,
        stroke: css(`--ink-${(line.ink ?? index) % INKS}`),
        width: line.dots ? 1.25 : 1.75,
        dash: lines.length > 1 ? DASHES[(line.ink ?? index) % DASHES.length] : [],
        spanGaps: true,
        points: { show: Boolean(line.dots), size: 6, fill: css("--paper") },
      })),
    ],
    axes: [
      { ...axis, font, size: 26, space: small ? 70 : 90, values: (_, values) => values.map(distance) },
      { ...axis, font, size: 46, space: small ? 26 : 34, values: (_, values) => values.map(tick) },
    ],
    plugins: [markPlugin(marks)],
    hooks,
  };
}

function Table({ title, lines, xLabel }) {
  const longest = lines.reduce((a, b) => (b.points.length > a.points.length ? b : a), lines[0]);
  const step = Math.max(1, Math.ceil(longest.points.length / ROWS));
  const rows = longest.points.filter((_, i) => (longest.points.length - 1 - i) % step === 0);
  const near = (points, x) => [...points].reverse().find((p) => p[0] <= x)?.[2];
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${`Table of ${title}`}><table class="numbers">
    <thead><tr><th scope="col">${xLabel}</th>${lines.map((line) => html`<th scope="col">${line.label}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr><th scope="row">${count(row[0])}</th>
      ${lines.map((line) => html`<td>${number(near(line.points, row[0]))}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

function told(title, lines) {
  const parts = lines.filter((line) => line.points.length).map((line) => {
    const values = line.points.map((p) => p[2]).filter((v) => v !== null);
    const least = values.reduce((a, b) => Math.min(a, b), Infinity);
    const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
    return `${line.label} now ${number(values[values.length - 1])}, between ${number(least)} and ${number(most)}`;
  });
  return `${title}: ${parts.join("; ") || "nothing yet"}`;
}

function Swatch({ index }) {
  const dashes = DASHES[index % DASHES.length].join(" ");
  return html`<svg class="swatch" width="18" height="8" aria-hidden="true">
    <line x1="0" y1="4" x2="18" y2="4" style=${{ stroke: ink(index) }} stroke-width="2" stroke-dasharray=${dashes} /></svg>`;
}

export function Chart({ title, lines, marks = [], height = 220, small = false, xLabel = "steps", stamp, hint }) {
  const place = useRef(null);
  const plot = useRef(null);
  const markRef = useRef(marks);
  const zoomed = useRef(false);
  const [at, setAt] = useState(null);
  const [open, setOpen] = useState(false);
  const [theme, setTheme] = useState(0);
  markRef.current = marks;
  const drawn = lines.filter((line) => line.points.length);
  const newest = useRef(drawn);
  newest.current = drawn;
  const shape = drawn.map((line) => line.label + line.ink).join("|");

  useEffect(() => {
    const again = () => setTheme((n) => n + 1);
    window.addEventListener("steppe:theme", again);
    return () => window.removeEventListener("steppe:theme", again);
  }, []);

  useEffect(() => {
    if (!drawn.length) return undefined;
    let watch = null;
    const leave = soon(() => {
      const size = { width: place.current.clientWidth, height };
      const onSelect = (u) => {
        zoomed.current ||= u.select.width > 0;
      };
      const onMove = (u) => setAt(u.cursor.idx ?? null);
      const hooks = { setCursor: [onMove], setSelect: [onSelect] };
      const now = newest.current;
      plot.current = new uPlot(options(now, size, small, xLabel, markRef, hooks), joined(now), place.current);
      zoomed.current = false;
      plot.current.over.addEventListener("dblclick", () => {
        zoomed.current = false;
      });
      watch = new ResizeObserver(() => plot.current?.setSize({ width: place.current.clientWidth, height }));
      watch.observe(place.current);
    });
    return () => {
      leave();
      watch?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, height, theme, xLabel]);

  useEffect(() => {
    if (!plot.current || !drawn.length) return;
    plot.current.setData(joined(drawn), !zoomed.current);
    if (zoomed.current) plot.current.redraw(false, true);
  }, [stamp, shape, marks.length, lines.reduce((sum, line) => sum + line.points.length, 0)]);

  const data = plot.current?.data;
  const value = (index, line) => {
    if (at !== null && data?.[index + 1]) {
      for (let i = at; i >= 0; i--) if (data[index + 1][i] != null) return data[index + 1][i];
    }
    return line.points[line.points.length - 1]?.[2];
  };
  const Key = (line, index) => html`<span class="key">
    ${drawn.length > 1 && html`<${Swatch} index=${line.ink ?? index} /><span>${line.label}</span>`}
    <b>${number(value(index, line))}</b></span>`;
  return html`<figure class="chart ${small ? "small" : ""}">
    <figcaption>
      <span class="title">${title}</span>
      <span class="legend">${drawn.map(Key)}
        ${at !== null && data?.[0]?.[at] !== undefined && html`<span class="key quiet">at ${short(data[0][at])}</span>`}
      </span>
    </figcaption>
    <div class=${`plot ${small ? "low" : ""}`} ref=${place} role="img" aria-label=${told(title, drawn)}>
      ${!drawn.length && html`<p class="nothing">${hint || "Nothing measured yet."}</p>`}
    </div>
    ${marks.length > 0 && html`<ol class="marks" aria-label=${`Marks on ${title}`}>${marks.map((mark) => html`<li>
      <span class="at">${count(mark.at)}</span> ${mark.word}</li>`)}</ol>`}
    ${drawn.length > 0 && html`<details onToggle=${(event) => setOpen(event.target.open)}><summary>Table</summary>
      ${open && html`<${Table} title=${title} lines=${drawn} xLabel=${xLabel} />`}</details>`}
  </figure>`;
}
