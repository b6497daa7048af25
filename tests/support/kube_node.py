"""A fake Kubernetes node: it registers, takes the pods of one namespace, and reports their status like a kubelet.

`Container` decides what a pod does; here it is only ready until it is stopped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import httpx

from tests.support.kube import ControlPlane


class Container:
    """One container. A subclass may start processes."""

    def __init__(self, pod: dict[str, Any]) -> None:
        self.pod = pod

    def ready(self) -> bool:
        return True

    def ended(self) -> int | None:
        """Return the exit code; None while it runs."""
        return None

    def termination_message(self) -> str:
        """Return the termination message."""
        return ""

    def stop(self) -> int:
        """Send SIGTERM; return the exit code when it has ended."""
        return 0


class FakeNode:
    """Runs the pods of a namespace until `close`; `containers` has those of the current pods, by name."""

    def __init__(self, plane: ControlPlane, namespace: str, container: type[Container] = Container) -> None:
        self._plane, self._namespace, self._make_container = plane, namespace, container
        self.node = f"node-{namespace}"
        self.containers: dict[str, Container] = {}
        self._reported: dict[str, tuple[Any, ...]] = {}
        self._stopping: dict[str, threading.Thread] = {}
        self._stopped = threading.Event()
        self.hold_ready = False  # while true, no further pod becomes ready
        self.silent = False  # while true, pods end without a report, as on a lost node
        with plane.client() as client:
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.node}}
            client.post("/api/v1/nodes", json=node).raise_for_status()
        self._thread = threading.Thread(target=self._run, name="fake-node")
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for thread in self._stopping.values():
            thread.join()
        for container in self.containers.values():
            container.stop()

    def __enter__(self) -> FakeNode:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        with self._plane.client() as client:
            while not self._stopped.wait(0.1):
                with contextlib.suppress(httpx.TransportError):  # the API server may be away
                    self._update_pods(client)

    def _update_pods(self, client: httpx.Client) -> None:
        answer = client.get(f"/api/v1/namespaces/{self._namespace}/pods")
        if answer.status_code != 200:
            return
        for pod in answer.json()["items"]:
            name = pod["metadata"]["name"]
            if not pod["spec"].get("nodeName"):
                self._bind(client, name)
            elif pod["metadata"].get("deletionTimestamp"):
                self._stop_pod(name)
            else:
                self._update_pod(client, pod)

    def _bind(self, client: httpx.Client, name: str) -> None:
        about = {"name": name, "namespace": self._namespace}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": about, "target": {"kind": "Node", "name": self.node}}
        client.post(f"/api/v1/namespaces/{self._namespace}/pods/{name}/binding", json=body)

    def _update_pod(self, client: httpx.Client, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        container = self.containers.get(name)
        if container is None:
            container = self.containers[name] = self._make_container(pod)
        code = container.ended()
        ready = code is None and container.ready() and (not self.hold_ready or self._reported.get(name, (False,))[0])
        if self._reported.get(name) != (ready, code) and self._report(client, pod, ready, code):
            self._reported[name] = (ready, code)

    def _report(self, client: httpx.Client, pod: dict[str, Any], ready: bool, code: int | None) -> bool:
        container = pod["spec"]["containers"][0]
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        state = (
            {"running": {"startedAt": now}}
            if code is None
            else {"terminated": {"exitCode": code, "finishedAt": now, "message": self._termination_message(pod)}}
        )
        status = {
            "phase": "Running",
            "startTime": now,
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": now}],
            "containerStatuses": [
                {"name": container["name"], "image": container["image"], "imageID": "", "ready": ready, "restartCount": 0, "state": state}
            ],
        }  # fmt: skip
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pod['metadata']['name']}/status"
        kind = {"Content-Type": "application/strategic-merge-patch+json"}
        return client.patch(path, json={"status": status}, headers=kind).status_code == 200

    def _termination_message(self, pod: dict[str, Any]) -> str:
        container = self.containers.get(pod["metadata"]["name"])
        return container.termination_message() if container is not None else ""

    def _stop_pod(self, name: str) -> None:
        """Stop a pod in a thread; when it has ended, report its termination message and delete the pod."""
        if name not in self._stopping:
            self._stopping[name] = threading.Thread(target=self._finish_pod, args=(name,), name=f"end of {name}")
            self._stopping[name].start()

    def _finish_pod(self, name: str) -> None:
        container = self.containers.pop(name, None)
        code = container.stop() if container is not None else 0
        with self._plane.client() as client:
            while not self._stopped.is_set():
                with contextlib.suppress(httpx.TransportError):
                    if container is None or self.silent or self._report(client, container.pod, False, code):
                        path = f"/api/v1/namespaces/{self._namespace}/pods/{name}"
                        client.request("DELETE", path, json={"gracePeriodSeconds": 0})
                        return
                self._stopped.wait(0.1)
