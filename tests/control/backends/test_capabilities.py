"""What a backend lacks is declared, and the service tells the caller; how far a scale request travels."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import steppe
from steppe.control.backends.base import BackendCapabilities, Unsupported
from steppe.control.backends.orchestrator import ACTOR
from steppe.control.factory import make_kubernetes_service, make_local_service
from steppe.control.http.app import make_app
from steppe.control.http.auth import AccessControl, TokenStore
from steppe.control.service import Service, operations
from steppe.records.run_directory import RunDirectory
from steppe.records.store import RUNNING, RunStore
from tests.control.backends.test_kubernetes import Pods

pytestmark = pytest.mark.unit
SOURCE = Path(steppe.__file__).parent
RUN = {"env": "CartPole-v1", "mode": "async", "runtime": "processes", "actors": 1, "name": "demo", "start": False}
REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "create_run": ("POST", "", {**RUN, "name": "other"}),
    "pause_run": ("POST", "/demo/pause", None),
    "resume_run": ("POST", "/demo/resume", None),
    "kill_run": ("POST", "/demo/kill", None),
    "delete_run": ("DELETE", "/demo", None),
    "scale_actors": ("PUT", "/demo/actors", {"actors": 2}),
}
OPTIONAL = [field.name for field in dataclasses.fields(BackendCapabilities) if field.default is dataclasses.MISSING]


@pytest.fixture
def client() -> Iterator[Callable[[Service], TestClient]]:
    """Make a client of a service, with its admin token; the services are closed afterwards."""
    services = []

    def make(service: Service) -> TestClient:
        services.append(service)
        tokens = TokenStore(service.private / "tokens.json")
        app = make_app(service, AccessControl(tokens))
        headers = {"Authorization": f"Bearer {tokens.tokens['admin']}"}
        return TestClient(app, base_url="http://127.0.0.1", headers=headers)

    yield make
    for service in services:
        service.close()


def files_on_stack(route: str) -> set[str]:
    """Return the files of the package between the route's function and the caller of this function."""
    found, frame = set[str](), sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            found.add(str(path.relative_to(SOURCE)))
        if frame.f_code.co_name == route and path.name == "app.py":
            return found
        frame = frame.f_back
    raise AssertionError(f"{route} is not on the stack")


def test_requests_cover_every_optional_operation():
    assert sorted(OPTIONAL) == sorted(REQUESTS)
    assert set(OPTIONAL) <= set(operations())


@pytest.mark.parametrize("name", REQUESTS)
def test_an_unsupported_operation_is_refused_with_the_declared_reason(name: str, client):
    service = make_local_service()
    http = client(service)
    assert http.post("/api/v1/runs", json=RUN).status_code == 201
    reason = f"this backend lacks {name}: do something else"
    service.backend.capabilities = dataclasses.replace(service.backend.capabilities, **{name: Unsupported(reason)})
    method, path, body = REQUESTS[name]
    answer = http.request(method, f"/api/v1/runs{path}", json=body)
    assert (answer.status_code, answer.json()["detail"]) == (422, reason)
    assert [run["id"] for run in http.get("/api/v1/runs").json()["runs"]] == ["demo"]
    assert http.get("/api/v1/operations").json()["operations"] == []


def test_a_cluster_without_kafka_declares_that_it_cannot_pause(client):
    service = make_kubernetes_service(Pods())
    client(service)
    found = service.backend.capabilities
    lacking = {name for name in OPTIONAL if isinstance(getattr(found, name), Unsupported)}
    assert lacking == {"pause_run", "resume_run", "kill_run"}


def test_only_the_factory_names_backend_classes():
    kinds = {"LocalBackend", "ExternalBackend", "KubernetesBackend"}
    for path in (SOURCE / "control").rglob("*.py"):
        tree = ast.parse(path.read_text())
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & kinds
        assert not named or path.name == "factory.py", f"{path} names {named}"
        bases = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
        assert not {"Service", *kinds} & {ast.unparse(base) for base in bases}, f"{path} derives from a service"


def test_a_scale_request_passes_through_at_most_six_files(client, monkeypatch):
    """From the route's function to the command in the run's store. Middleware runs before the route and is not counted."""
    service, paths = make_local_service(), []
    http = client(service)
    assert http.post("/api/v1/runs", json=RUN).status_code == 201
    RunDirectory(service.root / "demo").store.set_status(RUNNING)
    post = RunStore.post

    def recorded(store: RunStore, topic: str, record: dict[str, Any]) -> int:
        paths.append(files_on_stack("scale_actors") | {"records/store.py"})
        return post(store, topic, record)

    monkeypatch.setattr(RunStore, "post", recorded)
    assert http.put("/api/v1/runs/demo/actors", json={"actors": 2}).status_code == 202
    [path] = paths
    assert {"control/http/app.py", "control/service.py"} < path
    assert len(path) <= 6, sorted(path)


def test_a_scale_request_to_a_cluster_passes_through_at_most_six_files(client):
    """From the route's function to the Kubernetes client, whose file is counted although a fake replaces it."""

    class RecordingPods(Pods):
        def scale(self, role: str, count: int) -> None:
            paths.append(files_on_stack("scale_actors") | {"control/backends/kube_client.py"})
            super().scale(role, count)

    paths: list[set[str]] = []
    pods = RecordingPods()
    http = client(make_kubernetes_service(pods))
    assert http.put("/api/v1/runs/demo/actors", json={"actors": 3}).status_code == 202
    assert pods.replicas[ACTOR] == 3
    [path] = paths
    assert len(path) <= 6, sorted(path)
