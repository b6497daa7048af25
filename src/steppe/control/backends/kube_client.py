"""The Orchestrator of a Kubernetes namespace: the scale subresource, one ConfigMap, and a watch on the pods.

The first owner of `replicas` keeps it: another owner (an autoscaler, `kubectl scale`) is reported, never overruled.
Client calls and the watch run on the event loop of their own thread; callers block until their call returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client, config, watch
from kubernetes.aio.client.exceptions import ApiException

from steppe.control.backends.orchestrator import ROLES, RoleStatus, RunSpec
from steppe.core.contracts.errors import ConfigError, Conflict, Unreachable, UsageError

DEPLOYMENT_NAMES = {role: f"steppe-{role}" for role in ROLES}
RUN_CONFIG_MAP = "steppe-run"  # names the run that the namespace trains
ROLE_LABEL, DIGEST_ANNOTATION = "steppe.dev/role", "steppe.dev/settings"  # label, annotation
FIELD_MANAGER = "steppe"  # owner name of the fields that this service sets
COMPLETE_MESSAGE = "complete"  # termination message of a learner whose run is complete
UNSET_FIELD_MANAGER = "before-first-apply"  # the API server's name for the owner of a field that was never applied
CALL_S = 20.0
WATCH_S = 60  # a watch is restarted after this time, so that a silently dead connection is noticed
RETRY_BACKOFF_S = (0.2, 5.0)  # between attempts: initial and maximum
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

Result = TypeVar("Result")


class KubernetesClient:
    """Thread-safe until `close`. Needs only the permissions in deploy/k8s/base/rbac.yaml."""

    def __init__(self, namespace: str) -> None:
        """Connect with the service account in a pod, otherwise with kubeconfig."""
        self.name = namespace
        self.lost_reason: str | None = "the watch has not started yet"
        self._pods: dict[str, Any] = {}
        self._exit_codes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kubernetes", daemon=True)
        self._thread.start()
        self._watching: asyncio.Task[None] | None = None
        try:
            self._wait(self._open())
        except BaseException:
            self._end()
            raise

    async def _open(self) -> None:
        settings = client.Configuration()
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST"):
                config.load_incluster_config(settings)
            else:
                await config.load_kube_config(client_configuration=settings)
        except config.ConfigException as error:
            raise UsageError(f"cannot connect to a cluster: {error}; set KUBECONFIG, or run in a pod") from None
        self._client = client.ApiClient(settings)
        self._core, self._apps = client.CoreV1Api(self._client), client.AppsV1Api(self._client)
        self._watching = asyncio.ensure_future(self._watch())

    def close(self) -> None:
        """Stop the watch and close the connection."""
        with contextlib.suppress(Unreachable):
            self._wait(self._close_client())
        self._end()

    async def _close_client(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        # Before the watch ends: a watch that ends by itself closes its connection gracefully, which may take any time.
        await self._client.close()
        if self._watching is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def desired(self, role: str) -> int:
        return int(self._call(self._apps.read_namespaced_deployment_scale, DEPLOYMENT_NAMES[role]).spec.replicas or 0)

    def scale(self, role: str, count: int) -> None:
        about = {"name": DEPLOYMENT_NAMES[role], "namespace": self.name}
        body = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": about, "spec": {"replicas": count}}
        try:
            self._apply_scale(role, body, force=False)
        except Conflict as error:
            if set(re.findall(r'conflict with "([^"]+)"', str(error))) != {UNSET_FIELD_MANAGER}:
                raise Conflict(f"another controller owns the number of {DEPLOYMENT_NAMES[role]}: {error}") from None
            self._apply_scale(role, body, force=True)

    def _apply_scale(self, role: str, body: dict[str, Any], *, force: bool) -> None:
        patch = self._apps.patch_namespaced_deployment_scale
        self._call(patch, DEPLOYMENT_NAMES[role], body, field_manager=FIELD_MANAGER, force=force, _content_type=APPLY)

    def run_spec(self) -> RunSpec:
        found = self._call(self._core.read_namespaced_config_map, RUN_CONFIG_MAP)
        data = found.data or {}
        for key in ("run", "run.toml"):
            if not data.get(key):
                raise ConfigError(
                    f"the ConfigMap {RUN_CONFIG_MAP} in {self.name} has no {key!r}: apply deploy/k8s again"
                )
        return RunSpec(data["run"], data["run.toml"], found.metadata.resource_version)

    def set_run_spec(self, run: str, settings: str, version: str) -> None:
        body = {"metadata": {"resourceVersion": version}, "data": {"run": run, "run.toml": settings}}
        patch = self._core.patch_namespaced_config_map
        try:
            self._call(patch, RUN_CONFIG_MAP, body, field_manager=FIELD_MANAGER, _content_type=MERGE)
        except Conflict:
            raise Conflict(
                f"the ConfigMap {RUN_CONFIG_MAP} was changed by another client at the same time: check it, and try again"
            ) from None

    def restart(self, role: str, digest: str) -> None:
        body = {"spec": {"template": {"metadata": {"annotations": {DIGEST_ANNOTATION: digest}}}}}
        patch = self._apps.patch_namespaced_deployment
        self._call(patch, DEPLOYMENT_NAMES[role], body, field_manager=FIELD_MANAGER, _content_type=MERGE)

    def observed(self, role: str, digest: str) -> RoleStatus:
        with self._lock:
            pods = [pod for pod in self._pods.values() if (pod.metadata.labels or {}).get(ROLE_LABEL) == role]
            exit_code = self._exit_codes.get(role)
        ending = [pod for pod in pods if pod.metadata.deletion_timestamp is not None]
        current = [pod for pod in pods if pod.metadata.deletion_timestamp is None and pod.status.phase != "Failed"]
        ready = [pod for pod in current if _pod_condition(pod, "Ready") == "True"]
        problems = sorted({reason for pod in current if pod not in ready and (reason := _not_ready_reason(pod))})
        return RoleStatus(
            ready=len(ready),
            starting=len(current) - len(ready),
            ending=len(ending),
            outdated=sum((pod.metadata.annotations or {}).get(DIGEST_ANNOTATION, "") != digest for pod in current),
            restarts=sum(_count_restarts(pod) for pod in current),
            problem="; ".join(problems) or None,
            exit_code=exit_code,
            complete=any(end.message == COMPLETE_MESSAGE for pod in current for end in _terminated_states(pod)),
        )

    async def _watch(self) -> None:
        """Keep `_pods` equal to the cluster's state. After any error all pods are listed again: no change is missed."""
        pause_s = RETRY_BACKOFF_S[0]
        while True:
            try:
                await self._follow()
                pause_s = RETRY_BACKOFF_S[0]
            except (TimeoutError, ApiException, aiohttp.ClientError, OSError) as error:
                self.lost_reason = _error_message(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_BACKOFF_S[1])

    async def _follow(self) -> None:
        selected = {"namespace": self.name, "label_selector": ROLE_LABEL}
        listed = await self._core.list_namespaced_pod(**selected, _request_timeout=CALL_S)
        with self._lock:
            known, self._pods = self._pods, {}
            for pod in listed.items:
                self._track_pod(pod, new=pod.metadata.name not in known)
        self.lost_reason = None
        version = listed.metadata.resource_version
        while True:
            stream = watch.Watch().stream(
                self._core.list_namespaced_pod,
                **selected,
                resource_version=version,
                timeout_seconds=WATCH_S,
                allow_watch_bookmarks=True,
                _request_timeout=WATCH_S + CALL_S,
            )
            async with contextlib.aclosing(_watch_events(stream)) as events:
                async for kind, pod in events:
                    version = self._take(kind, pod)

    def _take(self, kind: str, pod: Any) -> str:
        if kind == "BOOKMARK":
            return str(pod["metadata"]["resourceVersion"])
        with self._lock:
            self._track_pod(pod, new=pod.metadata.name not in self._pods)
            if kind == "DELETED":
                del self._pods[pod.metadata.name]
        return str(pod.metadata.resource_version)

    def _track_pod(self, pod: Any, *, new: bool) -> None:
        """Store a pod and its exit code. A new pod clears its predecessor's code: its own may never be observed."""
        self._pods[pod.metadata.name], role = pod, pod.metadata.labels[ROLE_LABEL]
        if new:
            self._exit_codes.pop(role, None)
        for end in _terminated_states(pod):
            self._exit_codes[role] = int(end.exit_code)

    def _call(self, method: Callable[..., Awaitable[Any]], name: str, *arguments: Any, **options: Any) -> Any:
        async def called() -> Any:
            return await method(name, self.name, *arguments, _request_timeout=CALL_S, **options)

        try:
            return self._wait(called())
        except ApiException as error:
            raise _to_steppe_error(error, name, self.name) from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"the cluster does not answer: {_error_message(error)}") from None

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * CALL_S)


async def _watch_events(stream: Any) -> Any:
    """Yield the events of a watch, and close its connection afterwards."""
    try:
        async for event in stream:
            yield event["type"], event["object"]
    finally:
        await stream.close()


def _pod_condition(pod: Any, kind: str) -> str | None:
    return next((one.status for one in pod.status.conditions or () if one.type == kind), None)


def _terminated_states(pod: Any) -> list[Any]:
    """Return the last terminated state of each container that has one."""
    found = [
        status.state.terminated or (status.last_state and status.last_state.terminated)
        for status in pod.status.container_statuses or ()
    ]
    return [end for end in found if end]


def _count_restarts(pod: Any) -> int:
    return sum(status.restart_count for status in pod.status.container_statuses or ())


def _not_ready_reason(pod: Any) -> str | None:
    """Return why a pod is not ready, if the cluster reports a reason."""
    for status in pod.status.container_statuses or ():
        waiting, before = status.state.waiting, status.last_state and status.last_state.terminated
        if waiting and waiting.reason not in (None, "ContainerCreating", "PodInitializing"):
            code = f" after exit code {before.exit_code}" if before else ""
            return f"{waiting.reason}{code}: {waiting.message or ''}".rstrip(": ")
    for one in pod.status.conditions or ():
        if one.type == "PodScheduled" and one.status == "False":
            return f"{one.reason}: {one.message}"
    return None


def _to_steppe_error(error: ApiException, name: str, namespace: str) -> Exception:
    message = _error_message(error)
    if error.status == 404:
        return UsageError(f"the namespace {namespace} has no {name}: apply deploy/k8s there first")
    if error.status == 403:
        return UsageError(f"the cluster does not allow the request: {message}")
    if error.status == 409:
        return Conflict(message)
    if error.status in (400, 422):
        return UsageError(f"the cluster refuses the request: {message}")
    return Unreachable(f"unexpected response of the cluster: {message}")


def _error_message(error: BaseException) -> str:
    if isinstance(error, ApiException):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(error.body)["message"])
        return f"{error.status} {error.reason}"
    return str(error) or type(error).__name__
