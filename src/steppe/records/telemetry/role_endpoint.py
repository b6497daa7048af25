"""Monitoring of a role that runs alone: /healthz, /readyz and /metrics over HTTP, and its events as lines of JSON.

Nothing here depends on other processes: a role whose broker is down is healthy, and serves its last reports.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TextIO

from steppe.core.contracts.errors import MissingExtra, UsageError
from steppe.core.contracts.reports import ActorReport, EvaluationReport, Report, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING, Board

HANG_S = 120.0  # a role without a step for this long is not healthy
_REPORTS: dict[str, type[Report]] = {TRAINING: TrainingReport, ACTORS: ActorReport, EVALUATIONS: EvaluationReport}


class RoleEndpoint:
    """Endpoint of one role. `observe` returns a Board that observes the role's reports; call `heartbeat` at every step."""

    def __init__(self, run: str, role: str, *, lines: TextIO | None = None) -> None:
        self._identity = {"run": run, "role": role, "version": importlib.metadata.version("steppe")}
        self._lines = lines
        self._newest: dict[str, dict[str, Any]] = {}
        self._last_step_s: float | None = None  # None until the role starts: waiting for other roles is not a failure
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def serve(self, port: int, host: str = "") -> int:
        """Serve HTTP on a port (0: a free one) until `close`; return the port."""
        try:
            from steppe.records.telemetry.prometheus import CONTENT_TYPE
        except ImportError:
            raise MissingExtra("--metrics-port", "kafka") from None
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = endpoint.respond(self.path)
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                """Log nothing: probes send a request every few seconds."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise UsageError(f"cannot listen on port {port}: {error.strerror}; choose another --metrics-port") from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="role-endpoint", daemon=True)
        self._thread.start()
        return int(self._server.server_port)

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def heartbeat(self) -> None:
        self._last_step_s = time.monotonic()

    def log_event(self, kind: str, **details: Any) -> None:
        """Print one event as a JSON line, if lines are enabled."""
        if self._lines is not None:
            line = {"time_s": time.time(), **self._identity, "kind": kind, "details": details}
            print(json.dumps(line), file=self._lines, flush=True)

    def observe(self, board: Board) -> Board:
        """Return a Board that forwards everything to `board` and observes what is posted."""
        return _ObservedBoard(board, self)

    def receive(self, topic: str, record: dict[str, Any]) -> None:
        if topic in _REPORTS:
            self._newest[topic] = record
        elif topic == EVENTS and record.get("kind") != "span":
            self.log_event(str(record.get("kind")), **record.get("details", {}))

    def respond(self, path: str) -> tuple[int, bytes]:
        if path == "/healthz":
            hangs = self._last_step_s is not None and time.monotonic() - self._last_step_s > HANG_S
            return (503, b"no step for too long\n") if hangs else (200, b"ok\n")
        if path == "/readyz":
            return (200, b"ok\n") if self._last_step_s is not None else (503, b"waiting for the run\n")
        if path == "/metrics":
            return 200, self._metrics()
        return 404, b"not found: use /healthz, /readyz or /metrics\n"

    def _metrics(self) -> bytes:
        from steppe.records.telemetry import prometheus

        samples = [
            sample
            for topic, record in list(self._newest.items())
            for sample in prometheus.samples_of(_REPORTS[topic].read(record))
        ]
        return prometheus.render_families(prometheus.group_into_families(samples))


class _ObservedBoard:
    def __init__(self, board: Board, endpoint: RoleEndpoint) -> None:
        self._board, self._endpoint = board, endpoint

    def post(self, topic: str, record: dict[str, Any]) -> int:
        self._endpoint.receive(topic, record)
        return self._board.post(topic, record)

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        return self._board.read(topic, after, limit)


def start_role_endpoint(run: str, role: str, port: int | None, *, log_json: bool) -> RoleEndpoint:
    """Create the endpoint that the command line asks for; without port and JSON lines it does nothing."""
    endpoint = RoleEndpoint(run, role, lines=sys.stdout if log_json else None)
    if port is not None:
        endpoint.serve(port)
    return endpoint
