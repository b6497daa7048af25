// A run's curves on the page's side: fetched once, then only what is new. x is environment steps, which never go back:
// where a run went on from an older checkpoint, what it had done since is forgotten.

import { metrics } from "./api.js";
import { follow } from "./live.js";

const POINTS = 400;
const MOST = 2400; // beyond it, ask for the whole curve again, thinned out by the service

export class Curves {
  constructor(run, wanted, changed) {
    Object.assign(this, { run, wanted, changed, series: new Map(), names: [], cursor: 0 });
    Object.assign(this, { loaded: false, synced: false, busy: false });
    this.leave = follow(run, { points: (message) => this.take(message), again: () => this.again() });
  }

  close() {
    this.closed = true;
    this.leave();
  }

  // First what is looked at first, then the rest.
  async load(first) {
    const found = await metrics(this.run, { points: 2 }); // which curves there are
    this.names = found.names;
    const begin = first.filter((name) => found.names.includes(name));
    if (begin.length) this.put(await metrics(this.run, { series: begin, points: POINTS }));
    const rest = found.names.filter((name) => !first.includes(name) && this.wanted(name)).slice(0, 50);
    if (rest.length) this.put(await metrics(this.run, { series: rest, points: POINTS }));
    this.cursor = found.next;
    this.loaded = true;
  }

  // The service is back, or began anew: what comes next need not follow what came last.
  async again() {
    await this.fetchNew();
    this.synced = false;
  }

  put(found) {
    this.names = found.names;
    for (const one of found.series) if (one.points.length) this.series.set(one.name, one.points);
    this.changed();
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
      this.changed();
    } catch (problem) {
      if (problem.status) throw problem;
    } finally {
      this.busy = false;
    }
  }

  // The first message after a fetch may have missed something in between, the later ones follow each other.
  take(message) {
    if (!this.synced) return void this.fetchNew();
    if (message.next <= this.cursor) return;
    for (const [name, points] of Object.entries(message.series)) {
      if (!this.names.includes(name)) this.names = [...this.names, name].sort();
      this.append(name, points);
    }
    this.cursor = message.next;
    this.changed();
  }

  append(name, points) {
    if (!this.wanted(name) || !points.length) return;
    const known = this.series.get(name) || [];
    const last = known.length ? known[known.length - 1][1] : -Infinity;
    for (const point of points) {
      if (point[1] <= last) continue;
      while (known.length && known[known.length - 1][0] > point[0]) known.pop();
      known.push(point);
    }
    this.series.set(name, known);
    if (known.length > MOST) this.thin(name);
  }

  async thin(name) {
    if (this.thinning) return;
    this.thinning = true;
    try {
      const found = await metrics(this.run, { series: [name], points: POINTS });
      this.series.set(name, found.series[0].points);
    } finally {
      this.thinning = false;
    }
  }

  // Where on the x axis something happened that only has a time.
  stepsAt(time_s) {
    const known = this.series.get("train/updates") || this.series.get("train/return_mean") || [];
    const found = known.find((point) => point[1] >= time_s) || known[known.length - 1];
    return found ? found[0] : null;
  }
}
