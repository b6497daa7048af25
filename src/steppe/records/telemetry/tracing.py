"""Work as OpenTelemetry spans, sent over OTLP if the standard OTEL_* variables name a collector (`steppe[otel]`).

Without these variables nothing is imported, and a role checks only once whether tracing is enabled.
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from steppe.core.contracts.errors import ConfigError, MissingExtra

RecordSpan = Callable[[str, float, Mapping[str, object]], None]  # phase, duration in seconds until now, details
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
FLUSH_S = 2.0  # how long sending the last spans may delay the end of the process

_provider_of_process: tuple[int, Any] | None = None  # process id and its provider: threads do not survive a fork


def make_span_recorder(run: str, role: str, environ: Mapping[str, str] = os.environ) -> RecordSpan | None:
    """Return a function that records a role's spans; None if tracing is not enabled."""
    if not is_tracing_enabled(environ):
        return None
    _provider()  # now, so that a missing package is reported at the start

    def record_span(phase: str, seconds: float, details: Mapping[str, object]) -> None:
        end = time.time_ns()
        attributes = {
            f"steppe.{name}": value for name, value in details.items() if isinstance(value, int | float | str)
        }
        tracer = _provider().get_tracer("steppe")
        attributes |= {"steppe.run": run, "steppe.role": role}
        tracer.start_span(phase, start_time=end - int(seconds * 1e9), attributes=attributes).end(end)

    return record_span


def is_tracing_enabled(environ: Mapping[str, str]) -> bool:
    """Whether tracing is enabled. ConfigError if it is requested in a way that is not supported."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    if exporter not in ("", "otlp"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER={exporter}: traces are sent by otlp, or by none")
    if not (exporter or any(environ.get(name) for name in ENDPOINTS)):
        return False
    for name in PROTOCOLS:
        if environ.get(name, "http/protobuf") != "http/protobuf":
            raise ConfigError(f"{name}={environ[name]}: traces are sent by http/protobuf, usually to port 4318")
    return True


def shutdown_tracing() -> None:
    """Send pending spans, for at most FLUSH_S; later spans get a new provider."""
    global _provider_of_process
    if _provider_of_process is not None and _provider_of_process[0] == os.getpid():
        thread = threading.Thread(target=_provider_of_process[1].shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(FLUSH_S)
    _provider_of_process = None


def _provider() -> Any:
    global _provider_of_process
    if _provider_of_process is None or _provider_of_process[0] != os.getpid():
        _provider_of_process = (os.getpid(), _make_provider())
    return _provider_of_process[1]


def _make_provider() -> Any:
    """Create a provider; sampler, resource, batching and exporter follow the OTEL_* variables."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise MissingExtra("tracing (OTEL_EXPORTER_OTLP_ENDPOINT)", "otel") from None
    attributes = {"service.version": importlib.metadata.version("steppe")}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = "steppe"
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
