"""A real control plane for tests: etcd, kube-apiserver and kube-controller-manager as processes on loopback.

scripts/build-kube brings the programs. There are no nodes: kube_node.py is one.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.commands import free_port

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # only bounds how long a failure takes
ADMIN = "admin-of-the-tests"
CONTROLLERS = (
    "deployment-controller,replicaset-controller,statefulset-controller,serviceaccount-controller,disruption-controller,"
    "garbage-collector-controller,namespace-controller,validatingadmissionpolicy-status-controller"
)


def until(holds: Callable[[], Any], what: str) -> Any:
    """What `holds` returns once it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what} never came true"
        time.sleep(0.05)
    return found


class ControlPlane:
    """One after the other: `start`, any number of requests, `stop`."""

    def __init__(self, programs: Path, home: Path) -> None:
        self.programs, self.home = programs, home
        self.ports = {name: free_port() for name in ("etcd", "peer", "api", "manager")}
        self.address = f"https://127.0.0.1:{self.ports['api']}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        key = self.home / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=60)
        (self.home / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
        store = f"http://127.0.0.1:{self.ports['etcd']}"
        peer = f"http://127.0.0.1:{self.ports['peer']}"
        self._run(
            "etcd",
            *("--data-dir", self.home / "etcd", "--listen-client-urls", store, "--advertise-client-urls", store),
            *(
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                f"default={peer}",
            ),
        )
        self.start_api()
        self.kubeconfig = self.write_kubeconfig("admin", ADMIN)
        self._run(
            "kube-controller-manager",
            *("--kubeconfig", self.kubeconfig, "--service-account-private-key-file", key, "--leader-elect=false"),
            *("--controllers", CONTROLLERS, "--bind-address", "127.0.0.1", "--secure-port", self.ports["manager"]),
            *("--cert-dir", self.home / "manager", "--kube-api-qps", 200, "--kube-api-burst", 400),
            *("--concurrent-deployment-syncs", 2, "--concurrent-replicaset-syncs", 2),
        )

    def start_api(self) -> None:
        key = self.home / "accounts.key"
        self._run(
            "kube-apiserver",
            *("--etcd-servers", f"http://127.0.0.1:{self.ports['etcd']}", "--cert-dir", self.home / "api"),
            *("--secure-port", self.ports["api"], "--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1"),
            *("--service-account-key-file", key, "--service-account-signing-key-file", key),
            *(
                "--service-account-issuer",
                "https://kubernetes.default.svc",
                "--service-cluster-ip-range",
                "10.9.0.0/24",
            ),
            *("--token-auth-file", self.home / "tokens.csv", "--authorization-mode", "RBAC"),
            *("--endpoint-reconciler-type", "none", "--enable-priority-and-fairness=false"),
        )
        until(self._ready, "the API server is ready")

    def _ready(self) -> bool:
        try:
            return (
                httpx.get(f"{self.address}/readyz", verify=False, timeout=5, headers=_bearer(ADMIN)).status_code == 200
            )
        except (httpx.TransportError, OSError):
            assert self._processes["kube-apiserver"].poll() is None, self.log("kube-apiserver")
            return False

    def stop_api(self) -> None:
        self._stop("kube-apiserver")

    def stop(self) -> None:
        for name in reversed(list(self._processes)):
            self._stop(name)

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text(errors="replace")[-3_000:]

    def client(self, token: str = ADMIN) -> httpx.Client:
        """Raw HTTP: an oracle that has nothing of the client under test."""
        return httpx.Client(base_url=self.address, headers=_bearer(token), verify=False, timeout=60)

    @property
    def authority(self) -> Path:
        return self.home / "api" / "apiserver.crt"

    def write_kubeconfig(self, name: str, token: str, address: str | None = None) -> Path:
        authority = base64.b64encode(self.authority.read_bytes()).decode()
        server = {"server": address or self.address, "certificate-authority-data": authority}
        path = self.home / f"{name}.kubeconfig"
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": server}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": "here", "user": name}}],
            "current-context": name,
        }
        path.write_text(json.dumps(kubeconfig))
        path.chmod(0o600)
        return path

    def kubectl(self, *words: object, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        line = [str(self.programs / "kubectl"), "--kubeconfig", str(self.kubeconfig), *map(str, words)]
        done = subprocess.run(line, input=stdin, text=True, capture_output=True, timeout=300, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def account_token(self, namespace: str, account: str) -> str:
        """A token of a ServiceAccount, as a pod of it is given."""
        with self.client() as admin:
            path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
            body = {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": 3600},
            }
            return str(admin.post(path, json=body).raise_for_status().json()["status"]["token"])

    def _run(self, name: str, *words: object) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            line = [str(self.programs / name), *map(str, words)]
            self._processes[name] = subprocess.Popen(line, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]})

    def _stop(self, name: str) -> None:
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def rendered(plane: ControlPlane, overlay: str, namespace: str) -> list[dict[str, Any]]:
    """The manifests of an overlay (or the base), in a namespace of the test's own."""
    text = plane.kubectl("kustomize", ROOT / "deploy" / "k8s" / overlay).stdout
    return [_moved(one, namespace) for one in yaml.safe_load_all(text)]


def _moved(manifest: dict[str, Any], namespace: str) -> dict[str, Any]:
    about = manifest["metadata"]
    if manifest["kind"] == "Namespace":
        about["name"] = namespace
    elif "namespace" in about:
        about["namespace"] = namespace
    for subject in manifest.get("subjects", ()):
        subject["namespace"] = namespace
    return manifest


def apply(plane: ControlPlane, manifests: list[Mapping[str, Any]], *options: str) -> str:
    """As a platform team does it: server-side."""
    text = "\n---\n".join(json.dumps(manifest) for manifest in manifests)
    return plane.kubectl("apply", "--server-side", *options, "-f", "-", stdin=text).stdout
