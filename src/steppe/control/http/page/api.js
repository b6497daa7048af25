// Requests to the service. A change has the session's CSRF token and an idempotency key, so that a repeated one is
// executed once. A problem document becomes an error whose message is shown to the reader.

const PREFIX = "/api/v1";
let session = null;

export class Problem extends Error {
  constructor(body, status) {
    super(body.detail || body.title || `the service answered ${status}`);
    this.status = status;
    this.code = body.code;
  }
}

async function request(method, path, body) {
  const headers = {};
  if (method !== "GET") {
    session ||= await request("GET", "/session");
    headers["X-CSRF-Token"] = session.csrf || "";
    headers["Idempotency-Key"] = crypto.getRandomValues(new Uint32Array(4)).join("-");
  }
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(PREFIX + path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Problem({ detail: "the service does not answer" }, 0);
  }
  if (response.ok) return response.status === 204 ? null : response.json();
  if (response.status === 401) window.dispatchEvent(new Event("steppe:signed-out"));
  throw new Problem(await response.json().catch(() => ({})), response.status);
}

export const get = (path) => request("GET", path);
export const post = (path, body) => request("POST", path, body);
export const put = (path, body) => request("PUT", path, body);
export const patch = (path, body) => request("PATCH", path, body);
export const remove = (path) => request("DELETE", path);

export function metrics(run, { series, since = 0, points = 500 }) {
  const query = new URLSearchParams({ since, max_points: points });
  for (const name of series || []) query.append("series", name);
  return get(`/runs/${run}/metrics?${query}`);
}

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// Poll an operation until it has succeeded or failed, and return it.
export async function waitForOperation(operation) {
  let current = operation;
  while (current.state === "pending") {
    await sleep(400);
    try {
      current = await get(`/operations/${operation.id}`);
    } catch (problem) {
      if (problem.status) throw problem; // 0: the service does not answer, but the operation persists
    }
  }
  return current;
}
