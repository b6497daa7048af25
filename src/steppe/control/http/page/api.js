// Requests to the service: the session's CSRF token on every change, a key so that a repeated change is carried out
// once, problem documents as errors whose message is the sentence for the reader.

const PREFIX = "/api/v1";
let session = null;

export class Problem extends Error {
  constructor(body, status) {
    super(body.detail || body.title || `the service answered ${status}`);
    this.status = status;
    this.code = body.code;
  }
}

async function ask(method, path, body) {
  const headers = {};
  if (method !== "GET") {
    session ||= await ask("GET", "/session");
    headers["X-CSRF-Token"] = session.csrf || "";
    headers["Idempotency-Key"] = crypto.getRandomValues(new Uint32Array(4)).join("-");
  }
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(PREFIX + path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Problem({ detail: "the service does not answer" }, 0);
  }
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  if (answer.status === 401) window.dispatchEvent(new Event("steppe:signed-out"));
  throw new Problem(await answer.json().catch(() => ({})), answer.status);
}

export const get = (path) => ask("GET", path);
export const post = (path, body) => ask("POST", path, body);
export const put = (path, body) => ask("PUT", path, body);
export const patch = (path, body) => ask("PATCH", path, body);
export const remove = (path) => ask("DELETE", path);

export function metrics(run, { series, since = 0, points = 500 }) {
  const query = new URLSearchParams({ since, max_points: points });
  for (const name of series || []) query.append("series", name);
  return get(`/runs/${run}/metrics?${query}`);
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// The operation when whoever carries it out has said so.
export async function settled(operation) {
  let found = operation;
  while (found.state === "pending") {
    await pause(400);
    try {
      found = await get(`/operations/${operation.id}`);
    } catch (problem) {
      if (problem.status) throw problem; // 0: the service is away, and the operation survives that
    }
  }
  return found;
}
