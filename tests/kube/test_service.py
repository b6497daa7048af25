"""`steppe serve --kubernetes` on a real API server, with the API's ServiceAccount; the tests read the cluster as admin."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import anyio
import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from steppe.control.backends.kube_client import KubernetesClient
from tests.support.kube import ROOT, until
from tests.support.kube_node import StandIn
from tests.support.kube_tunnel import Tunnel
from tests.support.service import Served

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
RUN = "/api/v1/runs/demo"


@pytest.fixture
def tunnel(plane):
    with Tunnel(plane.ports["api"]) as made:
        yield made


@pytest.fixture
def node(plane, namespace):
    with StandIn(plane, namespace) as made:
        yield made


@pytest.fixture
def served(plane, namespace, node, tunnel, tmp_path, monkeypatch):
    """A service that is connected to the cluster through the tunnel."""
    token = plane.account_token(namespace, "steppe-api")
    config = plane.write_kubeconfig(namespace, token, f"https://127.0.0.1:{tunnel.port}")
    monkeypatch.setenv("KUBECONFIG", str(config))
    made = Served(tmp_path)
    made.start("--kubernetes", namespace)
    yield made
    made.stop()


@pytest.fixture
def api(served):
    with served.client() as client:
        yield client


def objects(plane, path):
    with plane.client() as admin:
        return admin.get(path).raise_for_status().json()


def deployment(plane, namespace, role):
    return objects(plane, f"/apis/apps/v1/namespaces/{namespace}/deployments/steppe-{role}")


def pods(plane, namespace, role):
    found = objects(plane, f"/api/v1/namespaces/{namespace}/pods?labelSelector=steppe.dev/role%3D{role}")["items"]
    return {pod["metadata"]["uid"]: pod for pod in found}


def finished(api, answer, state="succeeded"):
    assert answer.status_code == 202, answer.text
    found = answer.json()
    path = f"/api/v1/operations/{found['operation']['id'] if 'operation' in found else found['id']}"
    done = until(lambda: (found := api.get(path).json())["state"] != "pending" and found, "the operation is finished")
    assert done["state"] == state, done
    return done


def test_actors_are_scaled_from_0_to_16_and_back(plane, namespace, api):
    for count in (0, 16, 0):
        finished(api, api.put(f"{RUN}/actors", json={"actors": count}))
        assert deployment(plane, namespace, "actor")["spec"]["replicas"] == count
        assert len(pods(plane, namespace, "actor")) == count
        found = api.get(f"{RUN}/actors").json()
        assert (found["desired"], found["ready"], found["most"]) == (count, count, 16)


def test_actors_are_scaled_over_mcp(plane, namespace, served):
    async def scenario():
        headers = {"Authorization": f"Bearer {served.token('control')}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=90) as http,
            Client(streamable_http_client(f"{served.address}/mcp", http_client=http)) as client,
        ):
            for count in (0, 16, 0):
                done = await client.call_tool("scale_actors", {"run": "demo", "count": count, "wait_s": 90})
                assert done.structured_content["state"] == "succeeded", done
                assert len(pods(plane, namespace, "actor")) == count
            for count in (17, -1):
                assert (await client.call_tool("scale_actors", {"run": "demo", "count": count})).is_error
        assert deployment(plane, namespace, "actor")["spec"]["replicas"] == 0

    anyio.run(scenario)


@pytest.mark.parametrize("count", [17, -1])
def test_invalid_numbers_of_actors_are_refused_and_change_nothing(plane, namespace, api, count):
    before = deployment(plane, namespace, "actor")["metadata"]["generation"]
    assert api.put(f"{RUN}/actors", json={"actors": count}).status_code == 422
    assert deployment(plane, namespace, "actor")["metadata"]["generation"] == before


def test_ready_counts_observed_pods_not_requested_ones(plane, namespace, api, node):
    finished(api, api.put(f"{RUN}/actors", json={"actors": 2}))
    node.hold_ready = True
    operation = api.put(f"{RUN}/actors", json={"actors": 5}).json()
    until(lambda: len(pods(plane, namespace, "actor")) == 5, "there are five pods")
    found = api.get(f"{RUN}/actors").json()
    assert (found["desired"], found["ready"]) == (5, 2)
    assert api.get(f"/api/v1/operations/{operation['id']}").json()["state"] == "pending"
    node.hold_ready = False
    until(lambda: api.get(f"{RUN}/actors").json()["ready"] == 5, "five are ready")
    until(
        lambda: api.get(f"/api/v1/operations/{operation['id']}").json()["state"] == "succeeded",
        "the operation has succeeded",
    )


def test_a_run_is_stopped_only_after_its_learner_has_ended(plane, namespace, api, node):
    until(lambda: api.get(RUN).json()["state"] == "RUNNING", "the run is running")
    done = finished(api, api.put(f"{RUN}/learner", json={"learner": 0}))
    assert done["message"] == "the learner ended normally, with a checkpoint"
    assert pods(plane, namespace, "learner") == {}
    until(lambda: api.get(RUN).json()["state"] == "STOPPED", "the run is stopped")
    finished(api, api.put(f"{RUN}/learner", json={"learner": 1}))
    assert len(pods(plane, namespace, "learner")) == 1
    until(lambda: api.get(RUN).json()["state"] == "RUNNING", "the run is running again")
    assert api.put(f"{RUN}/learner", json={"learner": 2}).status_code == 422
    node.silent = True
    done = finished(api, api.put(f"{RUN}/learner", json={"learner": 0}))
    assert "its exit code is unknown" in done["message"], "the exit code of its predecessor does not count"


def test_a_completed_run_is_not_restarted(plane, namespace, api, node):
    until(lambda: api.get(RUN).json()["state"] == "RUNNING", "the run is running")
    [learner] = [
        life for life in node.lives.values() if life.pod["metadata"]["labels"].get("steppe.dev/role") == "learner"
    ]
    learner.words, learner.ended = lambda: "complete", lambda: 0
    until(lambda: api.get(RUN).json()["state"] == "SUCCEEDED", "the run has ended")
    until(lambda: not pods(plane, namespace, "learner") and not pods(plane, namespace, "actor"), "no pod is left")
    assert api.get(RUN).json()["state"] == "SUCCEEDED"


def test_a_hyperparameter_changes_the_config_map_and_replaces_only_the_learner(plane, namespace, api):
    until(lambda: api.get(RUN).json()["state"] == "RUNNING", "the run is running")
    learners, actors = pods(plane, namespace, "learner"), pods(plane, namespace, "actor")
    change = {"values": {"learning_rate": 0.0125}}
    preview = api.patch(f"{RUN}/hyperparameters", json={**change, "dry_run": True}).json()
    assert preview["operation"] is None
    assert pods(plane, namespace, "learner").keys() == learners.keys()
    finished(api, api.patch(f"{RUN}/hyperparameters", json=change))
    assert api.get(RUN).json()["state"] != "SUCCEEDED"  # a replaced learner also exits with code 0
    data = objects(plane, f"/api/v1/namespaces/{namespace}/configmaps/steppe-run")["data"]
    assert tomllib.loads(data["run.toml"])["agent"]["learning_rate"] == 0.0125
    assert data["run"] == "demo"
    assert pods(plane, namespace, "learner").keys().isdisjoint(learners)
    assert pods(plane, namespace, "actor").keys() == actors.keys()
    found = {one["name"]: one["value"] for one in api.get(f"{RUN}/hyperparameters").json()["hyperparameters"]}
    assert found["learning_rate"] == 0.0125
    refused = api.patch(f"{RUN}/hyperparameters", json={"values": {"learning_rate": -1}})
    assert refused.status_code == 422


def test_another_environment_needs_another_run_and_replaces_all_roles(plane, namespace, api):
    until(lambda: api.get(RUN).json()["state"] == "RUNNING", "the run is running")
    other = {"env": "Acrobot-v1", "name": "other", "mode": "async", "actors": 8, "start": False}
    busy = api.post("/api/v1/runs", json=other)
    assert (busy.status_code, "stop it first" in busy.json()["detail"]) == (409, True)
    finished(api, api.put(f"{RUN}/learner", json={"learner": 0}))
    finished(api, api.put(f"{RUN}/actors", json={"actors": 3}))
    actors, managers = pods(plane, namespace, "actor"), pods(plane, namespace, "manager")
    made = api.post("/api/v1/runs", json=other)
    assert made.status_code == 201, made.text
    data = objects(plane, f"/api/v1/namespaces/{namespace}/configmaps/steppe-run")["data"]
    assert data["run"] == "other"
    assert tomllib.loads(data["run.toml"])["env"] == "Acrobot-v1"

    def replaced(role, before, count):
        now = pods(plane, namespace, role)
        return len(now) == count and now.keys().isdisjoint(before)

    until(lambda: replaced("actor", actors, 3), "actors are replaced")
    until(lambda: replaced("manager", managers, 1), "the manager is replaced")
    finished(api, api.post("/api/v1/runs/other/start"))
    until(lambda: api.get("/api/v1/runs/other").json()["state"] == "RUNNING", "the other run is running")
    assert api.put("/api/v1/runs/other/actors", json={"actors": 9}).status_code == 422
    assert api.put(f"{RUN}/actors", json={"actors": 1}).status_code == 409


def test_another_owner_of_the_replicas_is_reported_and_not_overruled(plane, namespace, api):
    finished(api, api.put(f"{RUN}/actors", json={"actors": 2}))
    body = {"spec": {"replicas": 5}}
    with plane.client() as admin:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/steppe-actor/scale?fieldManager=another-owner"
        admin.patch(path, json=body, headers={"Content-Type": "application/merge-patch+json"}).raise_for_status()
    refused = api.put(f"{RUN}/actors", json={"actors": 3})
    assert refused.status_code == 409
    assert "another-owner" in refused.json()["detail"]
    assert deployment(plane, namespace, "actor")["spec"]["replicas"] == 5
    until(lambda: api.get(f"{RUN}/actors").json()["desired"] == 5, "the number of the other owner is shown")


def test_a_lost_watch_is_reported_and_later_changes_are_not_missed(plane, namespace, api, tunnel):
    finished(api, api.put(f"{RUN}/actors", json={"actors": 4}))
    tunnel.cut()
    until(lambda: api.get("/readyz").status_code == 503, "the lost watch is reported")
    assert api.put(f"{RUN}/actors", json={"actors": 1}).status_code == 503
    with plane.client() as admin:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/steppe-actor/scale?fieldManager=steppe&force=true"
        body = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": "steppe-actor"},
            "spec": {"replicas": 7},
        }
        admin.patch(
            path, content=json.dumps(body), headers={"Content-Type": "application/apply-patch+yaml"}
        ).raise_for_status()
    until(lambda: len(pods(plane, namespace, "actor")) == 7, "there are seven pods")
    tunnel.mend()
    until(lambda: api.get("/readyz").status_code == 200, "the watch has recovered")
    until(
        lambda: (found := api.get(f"{RUN}/actors").json())["desired"] == found["ready"] == 7, "seven actors are ready"
    )


def test_a_killed_service_continues_after_its_restart(plane, namespace, node, tmp_path, monkeypatch):
    config = plane.write_kubeconfig(namespace, plane.account_token(namespace, "steppe-api"))
    monkeypatch.setenv("KUBECONFIG", str(config))
    served = Served(tmp_path)
    served.start("--kubernetes", namespace)
    with served.client() as api:
        operation = api.put(f"{RUN}/actors", json={"actors": 3}).json()
    served.kill()
    served.start("--kubernetes", namespace)
    with served.client() as api:
        until(
            lambda: api.get(f"/api/v1/operations/{operation['id']}").json()["state"] == "succeeded",
            "the operation has succeeded",
        )
        assert api.get(f"{RUN}/actors").json()["ready"] == 3
    served.stop()


def test_a_namespace_without_steppe_is_an_error_in_one_sentence(plane, tmp_path, monkeypatch):
    import subprocess
    import sys

    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    line = [
        sys.executable,
        "-c",
        "from steppe.cli.main import entry; entry()",
        "serve",
        "--port",
        "0",
        "--kubernetes",
        "default",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "apply deploy/k8s" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def in_a_pod(plane, namespace, tmp_path, monkeypatch):
    """Provide the environment of a pod: address, token and certificate of the API server."""
    from kubernetes.aio.config import incluster_config

    (tmp_path / "token").write_text(plane.account_token(namespace, "steppe-api"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(plane.ports["api"]))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(plane.authority))
    monkeypatch.setenv("KUBECONFIG", "/nowhere")


@pytest.mark.usefixtures("in_a_pod", "node")
def test_in_a_pod_the_service_account_is_used(namespace):
    client = KubernetesClient(namespace)
    try:
        assert client.run_spec().run == "demo"
        assert client.desired("actor") == 1
        until(lambda: client.observed("actor", "").ready == 1, "the actor is ready")
    finally:
        client.close()


@pytest.mark.usefixtures("in_a_pod")
def test_closing_closes_all_connections_even_if_the_cluster_does_not_answer(namespace, tunnel, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(tunnel.port))
    client = KubernetesClient(namespace)
    until(lambda: client.lost_reason is None, "the watch has started")
    client.scale("actor", 1)
    tunnel.stop()
    connections = sockets(tunnel.port)
    assert connections
    client.close()
    assert not connections & sockets(tunnel.port)


def sockets(port: int) -> set[str]:
    """Return the local ports of this process's connections to a port of this machine."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    mine = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    return {row[1] for row in rows if row[2].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in mine}


def test_a_cluster_service_has_the_same_operations(api):
    found = api.get("/api/v1/openapi.json").json()
    assert found["paths"].keys() == json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"].keys()


def test_unsupported_operations_are_refused_with_an_alternative(api):
    for verb in ("pause", "resume", "kill"):
        answer = api.post(f"{RUN}/{verb}")
        assert (answer.status_code, answer.json()["code"]) == (422, "usage_error"), answer.text
    assert api.delete(RUN).status_code == 409
    assert "kubectl logs" in api.get(f"{RUN}/logs").json()["lines"][0]
    assert isinstance(api, httpx.Client)
