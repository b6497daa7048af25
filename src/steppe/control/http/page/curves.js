// The curves of a run in the browser: fetched once, then only new points. x is environment steps and increases: if a run
// resumes from an older checkpoint, the points after that checkpoint are dropped.

import { metrics } from "./api.js";
import { follow } from "./live.js";

const POINTS = 400;
const MAX_POINTS = 2400; // a longer curve is fetched again, downsampled by the service

export class Curves {
  constructor(run, isShown, onChange) {
    Object.assign(this, { run, isShown, onChange, series: new Map(), names: [], cursor: 0 });
    Object.assign(this, { loaded: false, synced: false, busy: false });
    this.unfollow = follow(run, { onPoints: (message) => this.receive(message), onSnapshot: () => this.resync() });
  }

  close() {
    this.closed = true;
    this.unfollow();
  }

  // Load the curves named in `first`, then the others.
  async load(first) {
    const found = await metrics(this.run, { points: 2 }); // for the names
    this.names = found.names;
    const names = first.filter((name) => found.names.includes(name));
    if (names.length) this.put(await metrics(this.run, { series: names, points: POINTS }));
    const rest = found.names.filter((name) => !first.includes(name) && this.isShown(name)).slice(0, 50);
    if (rest.length) this.put(await metrics(this.run, { series: rest, points: POINTS }));
    this.cursor = found.next;
    this.loaded = true;
  }

  // After a snapshot the next message may not follow the last one: fetch what is missing.
  async resync() {
    await this.fetchNew();
    this.synced = false;
  }

  put(found) {
    this.names = found.names;
    for (const one of found.series) if (one.points.length) this.series.set(one.name, one.points);
    this.onChange();
  }

  async fetchNew() {
    if (this.busy || this.closed || !this.loaded) return;
    this.busy = true;
    try {
      const found = await metrics(this.run, { since: this.cursor, points: POINTS });
      this.names = found.names;
      for (const one of found.series) this.append(one.name, one.points);
      this.cursor = found.next;
      this.synced = true;
      this.onChange();
    } catch (problem) {
      if (problem.status) throw problem;
    } finally {
      this.busy = false;
    }
  }

  // There may be a gap before the first message after a snapshot; later messages are consecutive.
  receive(message) {
    if (!this.synced) return void this.fetchNew();
    if (message.next <= this.cursor) return;
    for (const [name, points] of Object.entries(message.series)) {
      if (!this.names.includes(name)) this.names = [...this.names, name].sort();
      this.append(name, points);
    }
    this.cursor = message.next;
    this.onChange();
  }

  append(name, points) {
    if (!this.isShown(name) || !points.length) return;
    const known = this.series.get(name) || [];
    const last = known.length ? known[known.length - 1][1] : -Infinity;
    for (const point of points) {
      if (point[1] <= last) continue;
      while (known.length && known[known.length - 1][0] > point[0]) known.pop();
      known.push(point);
    }
    this.series.set(name, known);
    if (known.length > MAX_POINTS) this.downsample(name);
  }

  async downsample(name) {
    if (this.downsampling) return;
    this.downsampling = true;
    try {
      const found = await metrics(this.run, { series: [name], points: POINTS });
      this.series.set(name, found.series[0].points);
    } finally {
      this.downsampling = false;
    }
  }

  // The environment steps at a time.
  stepsAt(time_s) {
    const known = this.series.get("train/updates") || this.series.get("train/return_mean") || [];
    const found = known.find((point) => point[1] >= time_s) || known[known.length - 1];
    return found ? found[0] : null;
  }
}
