"""The API contract: every operation has a route, the OpenAPI file is current, and requests can be repeated."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from steppe.control.factory import make_local_service
from steppe.control.http.app import make_app
from steppe.control.http.auth import AccessControl, TokenStore
from steppe.control.service import Service, operations
from tests.support.service import SHORT, Served, finished, make, run_of

ROOT = Path(__file__).parents[3]
RUNS = "/api/v1/runs"


@pytest.fixture
def schema(tmp_path: Path) -> dict:
    service = make_local_service()
    try:
        return make_app(service, AccessControl(TokenStore(tmp_path / "tokens.json"))).openapi()
    finally:
        service.close()


@pytest.mark.unit
def test_every_operation_has_one_route_and_there_are_no_other_routes(schema: dict):
    routed = [method["operationId"] for path in schema["paths"].values() for method in path.values()]
    assert sorted(routed) == sorted(operations())


@pytest.mark.unit
def test_every_public_method_of_the_service_is_an_operation():
    inner = {"close", "database", "reconcile", "private", "root", "run_view"}
    assert {name for name in vars(Service) if not name.startswith("_")} == set(operations()) | inner
    assert set(operations().values()) == {"read", "control", "admin"}


@pytest.mark.unit
def test_the_openapi_file_is_current(schema: dict):
    """`python scripts/write_openapi.py` writes it."""
    assert json.loads((ROOT / "docs" / "openapi.json").read_text()) == schema


@pytest.mark.unit
def test_requests_have_ranges_and_no_host_side_fields(schema: dict):
    request = schema["components"]["schemas"]["RunRequest"]["properties"]
    assert request["actors"]["exclusiveMinimum"] == 0
    assert not {"run_dir", "device", "init_from", "ray"} & set(request)


@pytest.mark.integration
def test_a_repeated_request_is_executed_once(api: httpx.Client):
    body, key = {**SHORT, "start": False}, {"Idempotency-Key": "once"}
    first = api.post(RUNS, json=body, headers=key)
    again = api.post(RUNS, json=body, headers=key)
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json()
    other = api.post(RUNS, json={**body, "seed": 1}, headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "key_reused")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: api.post(RUNS, json=body, headers={"Idempotency-Key": "crowd"}), range(8)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len(api.get(RUNS).json()["runs"]) == 2
    refused = api.post(RUNS, json={**body, "env": "nothing"}, headers={"Idempotency-Key": "twice"})
    assert refused.status_code == 422
    assert api.post(RUNS, json=body, headers={"Idempotency-Key": "twice"}).status_code == 201, (
        "the refused request was not executed"
    )


@pytest.mark.slow
@pytest.mark.integration
def test_responses_and_operations_survive_a_restart_of_the_service(served: Served):
    body, key = {**SHORT, "start": False}, {"Idempotency-Key": "kept"}
    with served.client() as api:
        first = api.post(RUNS, json=body, headers=key).json()
        stopped = finished(api, api.post(f"{RUNS}/{first['id']}/stop"))
    served.kill()
    served.start()
    with served.client() as api:
        assert api.post(RUNS, json=body, headers=key).json() == first
        assert api.get(f"/api/v1/operations/{stopped['id']}").json() == stopped
        assert run_of(api, first["id"])["state"] == "STOPPED"


@pytest.mark.slow
@pytest.mark.integration
def test_a_change_at_an_outdated_generation_is_refused(api: httpx.Client):
    run = make(api, SHORT, start=False)
    generation = run_of(api, run)["generation"]
    change = {"values": {"clip": 0.1}}
    stale = {"If-Match": str(generation + 7)}
    assert api.patch(f"{RUNS}/{run}/hyperparameters", json=change, headers=stale).status_code == 412
    match = {"If-Match": str(generation)}
    done = finished(api, api.patch(f"{RUNS}/{run}/hyperparameters", json=change, headers=match))
    assert done["message"] == "takes effect on restart"
    assert run_of(api, run)["generation"] == generation + 1
    assert api.post(f"{RUNS}/{run}/stop", headers=match).status_code == 412
    for values in ({"clip": -1}, {"hidden": [8]}, {"no_such": 1}, {"learning_rate": "fast"}, {}):
        assert api.patch(f"{RUNS}/{run}/hyperparameters", json={"values": values}).status_code == 422, values
    assert run_of(api, run)["config"]["agent.clip"] == 0.1


@pytest.mark.integration
def test_lists_and_prometheus(api: httpx.Client):
    run = make(api, SHORT, start=False)
    environments = {one["id"]: one for one in api.get("/api/v1/environments").json()["environments"]}
    assert environments["CartPole-v1"]["solved_at"] == 475.0
    algorithms = {one["name"]: one for one in api.get("/api/v1/algorithms").json()["algorithms"]}
    clip = next(one for one in algorithms["ppo"]["hyperparameters"] if one["name"] == "clip")
    assert (clip["value"], clip["effect"], clip["schema"]["exclusiveMinimum"]) == (0.2, "live", 0.0)
    assert 'steppe_runs{state="PENDING"} 1.0' in api.get("/metrics").text.splitlines()
    assert api.get("/version").json()["broker"] == "embedded"
    assert api.get(f"{RUNS}/{run}/actors").json()["most"] == 0, "the number of actors of a sync run is fixed"
    refused = api.put(f"{RUNS}/{run}/actors", json={"actors": 2})
    assert refused.status_code == 422
    assert "async" in refused.json()["detail"]
