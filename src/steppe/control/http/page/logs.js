// Log lines of a run's roles, followed with a cursor and scrolled to the end; always shown as plain text.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { usePolling } from "./parts.js";

const MAX_LINES = 500;
const FOLLOW_S = 2; // shorter than the service waits for open requests when it stops

export function Logs({ run }) {
  const [source, setSource] = useState("");
  const [sources, setSources] = useState([]);
  const [lines, setLines] = useState([]);
  const [following, setFollowing] = useState(true);
  const box = useRef(null);
  const begin = () => {
    let after = 0;
    let followS = 0;
    setLines([]);
    return async (obsolete) => {
      const query = new URLSearchParams({ after, max_bytes: 1048576, follow_s: followS });
      if (source) query.set("source", source);
      const found = await get(`/runs/${run.id}/logs?${query}`);
      if (obsolete()) return false;
      const more = found.next > after;
      after = found.next;
      followS = more ? 0 : FOLLOW_S;
      setSources(found.sources);
      if (found.lines.length) setLines((known) => [...known, ...found.lines].slice(-MAX_LINES));
      return more;
    };
  };
  usePolling(begin, following, 500, [run.id, source]); // of ended runs too: their last lines come after their final state
  useEffect(() => {
    if (following && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines, following]);
  const others = sources.filter((name) => name !== "supervisor");
  return html`<section class="card" id="logs" aria-label="Logs">
    <div class="row"><h2>Logs</h2>
      ${sources.length > 1 && html`<label class="inline">of
        <select value=${source} onChange=${(event) => setSource(event.target.value)}>
          <option value="">supervisor</option>${others.map((name) => html`<option value=${name}>${name}</option>`)}
        </select></label>`}
      <label class="check">
        <input type="checkbox" checked=${following} onChange=${(event) => setFollowing(event.target.checked)} /> follow
      </label>
    </div>
    <pre class="log" ref=${box} tabindex="0" role="log" aria-label="Log lines" aria-live="off">
      ${lines.length ? lines.join("\n") : "No output yet."}
    </pre>
  </section>`;
}
