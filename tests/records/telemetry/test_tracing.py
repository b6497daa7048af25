"""Spans as a collector receives them: OTLP over HTTP from real processes, decoded by OpenTelemetry's own protobuf."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from steppe.core.contracts.errors import ConfigError, MissingExtra
from steppe.records.telemetry.tracing import is_tracing_enabled, make_span_recorder

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRAIN = "from steppe.cli.main import entry; entry()"


class Collector:
    """A receiver on loopback; `spans` are (service, name, attributes, start_ns, end_ns)."""

    def __init__(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        collector = self
        self.spans, self.paths = [], set()

        class Takes(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.paths.add(self.path)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Takes)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def take(self, request):
        for resource in request.resource_spans:
            about = plain(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    times = span.start_time_unix_nano, span.end_time_unix_nano
                    self.spans.append((about["service.name"], span.name, plain(span.attributes), *times))

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def plain(attributes):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.close()


def environ(**more):
    return {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | more


@pytest.mark.slow
@pytest.mark.integration
def test_every_role_of_a_run_sends_its_spans(collector, tmp_path):
    words = ["train", "CartPole-v1", "--runtime", "processes", "--mode", "async", "--actors", "1", "--envs", "4"]
    words += ["--name", "traced", "-s", "steps=3000", "-s", "hidden=[8]", "-s", "evaluation.episodes=1"]
    began = time.time_ns()
    settings = environ(**{ENDPOINT: collector.address, "OTEL_SERVICE_NAME": "lab"})
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *words], env=settings, capture_output=True, text=True, timeout=300, check=False
    )
    ended = time.time_ns()
    assert done.returncode == 0, done.stderr
    assert collector.paths == {"/v1/traces"}
    assert {span[0] for span in collector.spans} == {"lab"}
    seen = {(about["steppe.role"], name) for _, name, about, *_ in collector.spans}
    parts = {"actor-0": {"collect"}, "learner": {"learn", "publish", "checkpoint"}, "manager": {"evaluate"}}
    assert seen == {(role, name) for role, names in parts.items() for name in names}
    assert {about["steppe.run"] for _, _, about, *_ in collector.spans} == {"traced"}
    assert all(began < start <= end < ended for *_, start, end in collector.spans)
    published = sorted(about["steppe.version"] for _, name, about, *_ in collector.spans if name == "publish")
    assert published == list(range(1, len(published) + 1))
    collected = sorted(about["steppe.sequence"] for _, name, about, *_ in collector.spans if name == "collect")
    assert collected == list(range(len(collected)))


@pytest.mark.integration
def test_disabled_tracing_loads_nothing_and_a_missing_collector_changes_nothing():
    program = """
import sys
from steppe.records.telemetry.tracing import shutdown_tracing, make_span_recorder
take = make_span_recorder("r", "learner")
print(take is None, any(name.startswith("opentelemetry") for name in sys.modules))
if take is not None:
    take("learn", 0.5, {"version": 3})
shutdown_tracing()
"""
    for more, said in (({}, "True False"), ({ENDPOINT: "http://127.0.0.1:9"}, "False True")):
        line = [sys.executable, "-c", program]
        done = subprocess.run(line, env=environ(**more), capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


@pytest.mark.unit
@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://there:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://there:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({ENDPOINT: "http://there:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://there:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_the_standard_variables_enable_and_disable_tracing(variables, on):
    assert is_tracing_enabled(variables) is on


@pytest.mark.unit
@pytest.mark.parametrize(
    "variables",
    [{"OTEL_TRACES_EXPORTER": "zipkin"}, {ENDPOINT: "http://x:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}],
)
def test_unsupported_settings_are_refused(variables):
    with pytest.raises(ConfigError, match="traces are sent by"):
        is_tracing_enabled(variables)


@pytest.mark.unit
def test_a_missing_extra_is_reported_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingExtra, match=r"steppe\[otel\]"):
        make_span_recorder("r", "learner", {ENDPOINT: "http://there:4318"})
