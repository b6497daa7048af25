"""The API against its OpenAPI file, with requests that schemathesis makes up: single ones, and sequences that follow links."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import run_state_machine_as_test
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.integration

FILE = Path(__file__).parents[3] / "docs" / "openapi.json"
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
# What was found first is reported, and not made smaller: the service remembers what it was told before.
QUIET = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
    phases=(Phase.generate,),
)
SEQUENCES = settings(QUIET, max_examples=10, stateful_step_count=8)
TURNS = 3


# The application on a port of its own, which starts no run and holds nobody up.
SERVE = """
import sys, uvicorn
from steppe.control.http.app import make_app
from steppe.control.http.auth import AccessControl, TokenStore, RequestLimits
from steppe.control.http.server import bind_listener
from steppe.control.factory import make_local_service
from steppe.control.run_requests import Bounds

service, listener = make_local_service(Bounds(live_runs=0)), bind_listener("127.0.0.1", 0)
keys = TokenStore(service.private / "tokens.json")
app = make_app(service, AccessControl(keys, limits=RequestLimits(burst=1e9, per_s=1e9, failed_attempts=1e9)))
print(listener.getsockname()[1], keys.tokens["admin"], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none")).run(sockets=[listener])
"""


class Up(NamedTuple):
    """Where it is, and what lets one in."""

    address: str
    headers: dict[str, str]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    environ = os.environ | {"STEPPE_RUNS": str(tmp_path_factory.mktemp("control") / "runs")}
    process = subprocess.Popen([sys.executable, "-c", SERVE], env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port, token = process.stdout.readline().split()
    yield Up(f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token}"})
    process.terminate()
    process.wait(60)
    process.stdout.close()


def only_what_there_is(context, body):
    """A run that can be made: nobody would make up the names in the registry."""
    if context.operation.definition.raw["operationId"] == "create_run" and isinstance(body, dict):
        return {**body, "env": "CartPole-v1", "algo": "ppo", "start": False}
    return body


def only_what_can_be(context, body):
    """A run that is made: sequences are about what comes after it."""
    if context.operation.definition.raw["operationId"] == "create_run":
        return {"env": "CartPole-v1", "steps": 1_000, "start": False}
    return body


single, linked = (schemathesis.openapi.from_path(FILE) for _ in range(2))
single.hooks.hook("map_body")(only_what_there_is)
linked.hooks.hook("map_body")(only_what_can_be)


@single.parametrize()
@settings(QUIET, max_examples=8)
def test_no_request_breaks_the_contract(case, up: Up):
    case.call_and_validate(base_url=up.address, headers=up.headers, checks=CHECKS)


@pytest.mark.slow
def test_no_sequence_of_requests_breaks_the_contract(up: Up):
    machine = linked.as_state_machine()

    class Workflow(machine):
        def get_call_kwargs(self, case):
            return {"headers": up.headers, "base_url": up.address}

        def validate_response(self, response, case, **kwargs):
            statuses.append((case.operation.definition.raw["operationId"], response.status_code))
            try:
                case.validate_response(response, checks=CHECKS)
            except BaseExceptionGroup as broken:
                breaks.append(broken)
                raise

    statuses: list[tuple[str, int]] = []
    breaks: list[BaseExceptionGroup] = []
    for turn in range(TURNS):
        with suppress(FlakyStrategyDefinition):  # the service remembers: what can follow the same requests may differ
            run_state_machine_as_test(seed(turn)(Workflow), settings=SEQUENCES)
    assert not breaks, breaks[0]
    assert len(statuses) >= 50
    done = {name for name, status in statuses if status < 300}
    assert "create_run" in done
    assert done & set(linked.raw_schema["paths"]["/api/v1/runs"]["post"]["responses"]["201"]["links"]), (
        "and what follows it"
    )
