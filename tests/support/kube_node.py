"""A node that is not one: it registers, takes the pods of one namespace, and says of them what a kubelet would.

What a pod does is up to `Life`: here, nothing but to be ready until it is asked to go.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import httpx

from tests.support.kube import ControlPlane


class Life:
    """One container's life. A test may put processes here."""

    def __init__(self, pod: dict[str, Any]) -> None:
        self.pod = pod

    def ready(self) -> bool:
        return True

    def ended(self) -> int | None:
        """Its exit code, once it has one."""
        return None

    def words(self) -> str:
        """What it leaves as its last word."""
        return ""

    def stop(self) -> int:
        """SIGTERM; the exit code, when it has gone."""
        return 0


class StandIn:
    """Looks after the pods of a namespace until `close`. `lives` are those of the pods that are there, by name."""

    def __init__(self, plane: ControlPlane, namespace: str, life: type[Life] = Life) -> None:
        self._plane, self._namespace, self._life = plane, namespace, life
        self.node = f"node-{namespace}"
        self.lives: dict[str, Life] = {}
        self._told: dict[str, tuple[Any, ...]] = {}
        self._going: dict[str, threading.Thread] = {}
        self._stopped = threading.Event()
        self.hold_ready = False  # while true, no further pod becomes ready
        self.silent = False  # while true, pods go without a word, as with a node that is lost
        with plane.client() as client:
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.node}}
            client.post("/api/v1/nodes", json=node).raise_for_status()
        self._thread = threading.Thread(target=self._live, name="stand-in")
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for thread in self._going.values():
            thread.join()
        for life in self.lives.values():
            life.stop()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _live(self) -> None:
        with self._plane.client() as client:
            while not self._stopped.wait(0.1):
                with contextlib.suppress(httpx.TransportError):  # the API server may be away
                    self._look(client)

    def _look(self, client: httpx.Client) -> None:
        answer = client.get(f"/api/v1/namespaces/{self._namespace}/pods")
        if answer.status_code != 200:
            return
        for pod in answer.json()["items"]:
            name = pod["metadata"]["name"]
            if not pod["spec"].get("nodeName"):
                self._bind(client, name)
            elif pod["metadata"].get("deletionTimestamp"):
                self._let_go(name)
            else:
                self._tend(client, pod)

    def _bind(self, client: httpx.Client, name: str) -> None:
        about = {"name": name, "namespace": self._namespace}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": about, "target": {"kind": "Node", "name": self.node}}
        client.post(f"/api/v1/namespaces/{self._namespace}/pods/{name}/binding", json=body)

    def _tend(self, client: httpx.Client, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        life = self.lives.get(name)
        if life is None:
            life = self.lives[name] = self._life(pod)
        code = life.ended()
        ready = code is None and life.ready() and (not self.hold_ready or self._told.get(name, (False,))[0])
        if self._told.get(name) != (ready, code) and self._say(client, pod, ready, code):
            self._told[name] = (ready, code)

    def _say(self, client: httpx.Client, pod: dict[str, Any], ready: bool, code: int | None) -> bool:
        container = pod["spec"]["containers"][0]
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        state = (
            {"running": {"startedAt": now}}
            if code is None
            else {"terminated": {"exitCode": code, "finishedAt": now, "message": self._words(pod)}}
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

    def _words(self, pod: dict[str, Any]) -> str:
        life = self.lives.get(pod["metadata"]["name"])
        return life.words() if life is not None else ""

    def _let_go(self, name: str) -> None:
        """SIGTERM, and when it has ended its last words and the end of the pod; others are not kept waiting."""
        if name not in self._going:
            self._going[name] = threading.Thread(target=self._end, args=(name,), name=f"end of {name}")
            self._going[name].start()

    def _end(self, name: str) -> None:
        life = self.lives.pop(name, None)
        code = life.stop() if life is not None else 0
        with self._plane.client() as client:
            while not self._stopped.is_set():
                with contextlib.suppress(httpx.TransportError):
                    if life is None or self.silent or self._say(client, life.pod, False, code):
                        path = f"/api/v1/namespaces/{self._namespace}/pods/{name}"
                        client.request("DELETE", path, json={"gracePeriodSeconds": 0})
                        return
                self._stopped.wait(0.1)
