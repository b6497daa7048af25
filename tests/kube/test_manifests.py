"""Every manifest on a real API server: applied server-side, with the restricted profile enforced."""

from __future__ import annotations

import subprocess
import uuid

import pytest
import yaml

from tests.support.kube import ROOT, apply, rendered, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
OVERLAYS = ("base", "overlays/dev", "overlays/production", "overlays/kuberay", "overlays/mpi")


def pod_specs(manifests):
    """Yield the spec of every pod that these manifests create, at any depth."""
    for manifest in manifests:
        waiting = [manifest.get("spec", {})]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict):
                if "containers" in part:
                    claims = [one["metadata"]["name"] for one in manifest["spec"].get("volumeClaimTemplates", ())]
                    volumes = [{"name": name, "emptyDir": {}} for name in claims] + part.get("volumes", [])
                    yield part | {"volumes": volumes}
                waiting += list(part.values())
            elif isinstance(part, list):
                waiting += part


@pytest.fixture(scope="module")
def operators(plane):
    """Install the custom resource definitions of KubeRay and of the MPI operator."""
    for path in sorted((plane.programs.parent / "crds").glob("*.yaml")):
        plane.kubectl("apply", "--server-side", "-f", path)
    for name in ("rayjobs.ray.io", "mpijobs.kubeflow.org"):
        wait = ("wait", "--for=condition=Established", f"crd/{name}", "--timeout=60s")
        until(lambda wait=wait: plane.kubectl(*wait, check=False).returncode == 0, f"{name} is established")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_can_be_applied_and_applied_again_without_a_change(plane, operators, overlay):
    name = f"t{uuid.uuid4().hex[:8]}"
    manifests = rendered(plane, overlay, name)
    first = apply(plane, manifests)
    assert first.count("serverside-applied") == len(manifests)
    plane.kubectl("diff", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(manifests))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_passes_the_restricted_profile(plane, overlay):
    name = f"t{uuid.uuid4().hex[:8]}"
    manifests = rendered(plane, overlay, name)
    spaces = [one for one in manifests if one["kind"] == "Namespace"]
    assert [one["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] for one in spaces] == ["restricted"]
    accounts = [one for one in manifests if one["kind"] == "ServiceAccount"]
    apply(plane, spaces + accounts)
    until(lambda: plane.kubectl("-n", name, "get", "sa", "default", check=False).returncode == 0, "the accounts exist")
    found = list(pod_specs(manifests))
    assert found
    for number, spec in enumerate(found):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{number}", "namespace": name}, "spec": spec}
        apply(plane, [pod], "--dry-run=server")
        assert spec.get("automountServiceAccountToken") is False or spec["serviceAccountName"] == "steppe-api"


def test_a_pod_without_restrictions_is_refused(plane, namespace):
    spec = {"containers": [{"name": "root", "image": "any", "securityContext": {"runAsUser": 0}}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root", "namespace": namespace}, "spec": spec}
    refused = plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(pod), check=False)
    assert refused.returncode != 0
    assert "restricted" in refused.stderr


@pytest.mark.parametrize("overlay", OVERLAYS[:3])
def test_no_manifest_sets_the_replicas_that_the_api_scales(plane, overlay):
    scaled = [
        one for one in rendered(plane, overlay, "x") if one["metadata"]["name"] in ("steppe-actor", "steppe-learner")
    ]
    deployments = [one for one in scaled if one["kind"] == "Deployment"]
    assert len(deployments) == 2
    assert all("replicas" not in one["spec"] for one in deployments)


def test_deployments_create_their_pods(plane, namespace):
    def made():
        found = plane.kubectl("-n", namespace, "get", "pods", "-o", "name").stdout.split()
        return len([name for name in found if "actor" in name or "learner" in name or "api" in name]) == 3 and found

    until(made, "there is one pod each of actor, learner and API")


def test_the_readme_describes_every_file():
    readme = (ROOT / "deploy" / "README.md").read_text()
    listed = subprocess.run(
        ["git", "ls-files", "deploy"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    files = [line.removeprefix("deploy/") for line in listed.stdout.split()]
    missing = [name for name in files if name != "README.md" and f"`{name}`" not in readme]
    assert missing == []
