// What the roles of a run printed: followed with a cursor, drawn from the end, shown as text and nothing else.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { useAsking } from "./parts.js";

const KEPT = 500;
const FOLLOW_S = 2; // shorter than the service waits for requests when it is stopped

export function Logs({ run }) {
  const [source, setSource] = useState("");
  const [sources, setSources] = useState([]);
  const [lines, setLines] = useState([]);
  const [following, setFollowing] = useState(true);
  const place = useRef(null);
  const begin = () => {
    let after = 0;
    let waiting = 0;
    setLines([]);
    return async (gone) => {
      const query = new URLSearchParams({ after, max_bytes: 1048576, follow_s: waiting });
      if (source) query.set("source", source);
      const found = await get(`/runs/${run.id}/logs?${query}`);
      if (gone()) return false;
      const more = found.next > after;
      after = found.next;
      waiting = more ? 0 : FOLLOW_S;
      setSources(found.sources);
      if (found.lines.length) setLines((known) => [...known, ...found.lines].slice(-KEPT));
      return more;
    };
  };
  useAsking(begin, following, 500, [run.id, source]); // of ended runs too: their last words come after their state
  useEffect(() => {
    if (following && place.current) place.current.scrollTop = place.current.scrollHeight;
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
    <pre class="log" ref=${place} tabindex="0" role="log" aria-label="Log lines" aria-live="off">
      ${lines.length ? lines.join("\n") : "Nothing printed yet."}
    </pre>
  </section>`;
}
