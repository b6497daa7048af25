// A chart: drawn by uPlot, described in a sentence for screen readers, and available as a table. Lines differ by dash as
// well as by colour; marks are vertical lines with a label.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { count, number, short, tickLabel } from "./format.js";

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [1, 4], [12, 4], [6, 2, 1, 2]];
const COLORS = 8;
const TABLE_ROWS = 12;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const lineColor = (index) => `var(--line-${index % COLORS})`;

// Charts are drawn a few per frame, so that a page with fifty of them stays responsive.
const SLICE_MS = 8;
const drawQueue = new Set();

function drawQueued() {
  const until = performance.now() + SLICE_MS;
  try {
    for (const draw of drawQueue) {
      drawQueue.delete(draw);
      draw();
      if (performance.now() > until) break;
    }
  } finally {
    if (drawQueue.size) requestAnimationFrame(drawQueued);
  }
}

// Call `draw` in one of the next frames; return a function that cancels the call.
function scheduleDraw(draw) {
  if (!drawQueue.size) requestAnimationFrame(drawQueued);
  drawQueue.add(draw);
  return () => drawQueue.delete(draw);
}

function toTable(lines) {
  const tables = lines.map(({ points }) => [points.map((p) => p[0]), points.map((p) => p[2])]);
  return tables.length > 1 ? uPlot.join(tables) : tables[0];
}

function truncated(ctx, text, width) {
  let kept = text;
  while (kept && ctx.measureText(`${kept}…`).width > width) kept = kept.slice(0, -1);
  return ctx.measureText(text).width <= width ? text : `${kept}…`;
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
          const width = (right ? x - bbox.left : bbox.left + bbox.width - x) - 2 * gap;
          ctx.textAlign = right ? "right" : "left";
          ctx.fillText(truncated(ctx, mark.label, width), x + (right ? -gap : gap), bbox.top + 11 * devicePixelRatio);
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
        stroke: css(`--line-${(line.color ?? index) % COLORS}`),
        width: line.dots ? 1.25 : 1.75,
        dash: lines.length > 1 ? DASHES[(line.color ?? index) % DASHES.length] : [],
        spanGaps: true,
        points: { show: Boolean(line.dots), size: 6, fill: css("--paper") },
      })),
    ],
    axes: [
      { ...axis, font, size: 26, space: small ? 70 : 90, values: (_, values) => values.map(distance) },
      { ...axis, font, size: 46, space: small ? 26 : 34, values: (_, values) => values.map(tickLabel) },
    ],
    plugins: [markPlugin(marks)],
    hooks,
  };
}

function Table({ title, lines, xLabel }) {
  const longest = lines.reduce((a, b) => (b.points.length > a.points.length ? b : a), lines[0]);
  const step = Math.max(1, Math.ceil(longest.points.length / TABLE_ROWS));
  const rows = longest.points.filter((_, i) => (longest.points.length - 1 - i) % step === 0);
  const near = (points, x) => [...points].reverse().find((p) => p[0] <= x)?.[2];
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${`Table of ${title}`}><table class="numbers">
    <thead><tr><th scope="col">${xLabel}</th>${lines.map((line) => html`<th scope="col">${line.label}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr><th scope="row">${count(row[0])}</th>
      ${lines.map((line) => html`<td>${number(near(line.points, row[0]))}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

function description(title, lines) {
  const parts = lines.filter((line) => line.points.length).map((line) => {
    const values = line.points.map((p) => p[2]).filter((v) => v !== null);
    const least = values.reduce((a, b) => Math.min(a, b), Infinity);
    const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
    return `${line.label} now ${number(values[values.length - 1])}, between ${number(least)} and ${number(most)}`;
  });
  return `${title}: ${parts.join("; ") || "no data"}`;
}

function Swatch({ index }) {
  const dashes = DASHES[index % DASHES.length].join(" ");
  return html`<svg class="swatch" width="18" height="8" aria-hidden="true">
    <line x1="0" y1="4" x2="18" y2="4" style=${{ stroke: lineColor(index) }} stroke-width="2" stroke-dasharray=${dashes} /></svg>`;
}

export function Chart({ title, lines, marks = [], height = 220, small = false, xLabel = "steps", revision, hint }) {
  const container = useRef(null);
  const plot = useRef(null);
  const markRef = useRef(marks);
  const zoomed = useRef(false);
  const [cursor, setCursor] = useState(null);
  const [open, setOpen] = useState(false);
  const [theme, setTheme] = useState(0);
  markRef.current = marks;
  const drawn = lines.filter((line) => line.points.length);
  const newest = useRef(drawn);
  newest.current = drawn;
  const shape = drawn.map((line) => line.label + line.color).join("|");

  useEffect(() => {
    const redraw = () => setTheme((n) => n + 1);
    window.addEventListener("steppe:theme", redraw);
    return () => window.removeEventListener("steppe:theme", redraw);
  }, []);

  useEffect(() => {
    if (!drawn.length) return undefined;
    let observer = null;
    const cancel = scheduleDraw(() => {
      const size = { width: container.current.clientWidth, height };
      const onSelect = (u) => {
        zoomed.current ||= u.select.width > 0;
      };
      const onMove = (u) => setCursor(u.cursor.idx ?? null);
      const hooks = { setCursor: [onMove], setSelect: [onSelect] };
      const now = newest.current;
      plot.current = new uPlot(options(now, size, small, xLabel, markRef, hooks), toTable(now), container.current);
      zoomed.current = false;
      plot.current.over.addEventListener("dblclick", () => {
        zoomed.current = false;
      });
      observer = new ResizeObserver(() => plot.current?.setSize({ width: container.current.clientWidth, height }));
      observer.observe(container.current);
    });
    return () => {
      cancel();
      observer?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, height, theme, xLabel]);

  useEffect(() => {
    if (!plot.current || !drawn.length) return;
    plot.current.setData(toTable(drawn), !zoomed.current);
    if (zoomed.current) plot.current.redraw(false, true);
  }, [revision, shape, marks.length, lines.reduce((sum, line) => sum + line.points.length, 0)]);

  const data = plot.current?.data;
  const value = (index, line) => {
    if (cursor !== null && data?.[index + 1]) {
      for (let i = cursor; i >= 0; i--) if (data[index + 1][i] != null) return data[index + 1][i];
    }
    return line.points[line.points.length - 1]?.[2];
  };
  const Key = (line, index) => html`<span class="key">
    ${drawn.length > 1 && html`<${Swatch} index=${line.color ?? index} /><span>${line.label}</span>`}
    <b>${number(value(index, line))}</b></span>`;
  return html`<figure class="chart ${small ? "small" : ""}">
    <figcaption>
      <span class="title">${title}</span>
      <span class="legend">${drawn.map(Key)}
        ${cursor !== null && data?.[0]?.[cursor] !== undefined && html`<span class="key quiet">at ${short(data[0][cursor])}</span>`}
      </span>
    </figcaption>
    <div class=${`plot ${small ? "low" : ""}`} ref=${container} role="img" aria-label=${description(title, drawn)}>
      ${!drawn.length && html`<p class="nothing">${hint || "No measurements yet."}</p>`}
    </div>
    ${marks.length > 0 && html`<ol class="marks" aria-label=${`Marks on ${title}`}>${marks.map((mark) => html`<li>
      <span class="at">${count(mark.at)}</span> ${mark.label}</li>`)}</ol>`}
    ${drawn.length > 0 && html`<details onToggle=${(event) => setOpen(event.target.open)}><summary>Table</summary>
      ${open && html`<${Table} title=${title} lines=${drawn} xLabel=${xLabel} />`}</details>`}
  </figure>`;
}
