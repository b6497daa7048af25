"""The permissions of the API's ServiceAccount: the API server is access about all of its resources."""

from __future__ import annotations

import json
import uuid

import pytest

from tests.support.kube import apply, rendered, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
VERBS = (
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
    "impersonate",
    "escalate",
    "bind",
)
# (resource, name, verb), with the existing names and one that does not exist.
EXPECTED = {
    *(
        ("apps/deployments/scale", name, verb)
        for name in ("steppe-actor", "steppe-learner")
        for verb in ("get", "patch")
    ),
    *(
        ("apps/deployments", name, verb)
        for name in ("steppe-actor", "steppe-learner", "steppe-manager")
        for verb in ("get", "patch")
    ),
    *(("/configmaps", "steppe-run", verb) for verb in ("get", "patch")),
    *(
        ("/pods", name, verb)
        for name in ("anything", "steppe-api", "steppe-actor")
        for verb in ("get", "list", "watch")
    ),
}
NAMES = ("anything", "steppe-api", "steppe-actor", "steppe-learner", "steppe-manager", "steppe-run", "steppe-kafka")
EXPECTED |= {("/pods", name, verb) for name in NAMES for verb in ("get", "list", "watch")}
# Resources by which every user may query the own permissions.
OWN = {"selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews"}


def resources(admin):
    """Yield every resource and subresource as (group, name, whether it is namespaced)."""
    groups = [("", "/api/v1")]
    listed = admin.get("/apis").raise_for_status().json()["groups"]
    groups += [(one["name"], f"/apis/{one['preferredVersion']['groupVersion']}") for one in listed]
    for group, path in groups:
        for one in admin.get(path).raise_for_status().json()["resources"]:
            yield group, one["name"], one["namespaced"]


def allowed(admin, user, namespace, access):
    group, resource, name, verb = access
    kind, _, part = resource.partition("/")
    about = {"group": group, "resource": kind, "subresource": part, "name": name, "verb": verb, "namespace": namespace}
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}", "system:authenticated"]
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": {k: v for k, v in about.items() if v}},
    }
    answer = admin.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json=body)
    return answer.raise_for_status().json()["status"]["allowed"]


def test_the_api_has_exactly_the_permissions_of_its_role(plane, namespace):
    user = f"system:serviceaccount:{namespace}:steppe-api"
    with plane.client() as admin:
        every = [one for one in resources(admin) if one[1] not in OWN]
        assert len(every) > 80
        found = {
            (f"{group}/{resource}", name, verb)
            for group, resource, _ in every
            for name in (
                NAMES if resource.partition("/")[0] in ("pods", "deployments", "configmaps") else ("anything",)
            )
            for verb in VERBS
            if allowed(admin, user, namespace, (group, resource, name, verb))
        }
        elsewhere = [
            (group, resource, verb)
            for group, resource, namespaced in every
            for verb in ("get", "list", "create", "patch")
            if allowed(admin, user, "kube-system" if namespaced else "", (group, resource, "", verb))
        ]
    assert found == EXPECTED
    assert elsewhere == []


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/api/v1/namespaces/{ns}/secrets", None),
        ("GET", "/api/v1/nodes", None),
        ("GET", "/api/v1/namespaces/kube-system/pods", None),
        ("DELETE", "/api/v1/namespaces/{ns}/pods/any", None),
        ("PATCH", "/apis/apps/v1/namespaces/{ns}/deployments/steppe-api", {"spec": {"replicas": 2}}),
        ("PATCH", "/apis/apps/v1/namespaces/{ns}/statefulsets/steppe-kafka", {"spec": {"replicas": 2}}),
        ("PATCH", "/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/roles/steppe-api", {"rules": []}),
        ("POST", "/api/v1/namespaces/{ns}/pods", {"apiVersion": "v1", "kind": "Pod"}),
        ("POST", "/api/v1/namespaces/{ns}/serviceaccounts/steppe-api/token", {}),
    ],
)
def test_other_requests_with_the_token_of_the_api_are_forbidden(plane, namespace, method, path, body):
    with plane.client(plane.account_token(namespace, "steppe-api")) as client:
        kind = {"Content-Type": "application/merge-patch+json" if method == "PATCH" else "application/json"}
        answer = client.request(
            method, path.format(ns=namespace), content=json.dumps(body) if body else None, headers=kind
        )
    assert answer.status_code == 403, answer.text


def test_roles_have_no_permissions(plane, namespace):
    user = f"system:serviceaccount:{namespace}:steppe-role"
    with plane.client() as admin:
        for group, resource, _ in resources(admin):
            if resource not in OWN:
                assert not allowed(admin, user, namespace, (group, resource, "anything", "get")), resource


def test_with_the_admission_policy_the_api_can_only_roll_out(plane):
    name = f"t{uuid.uuid4().hex[:8]}"
    apply(plane, rendered(plane, "overlays/production", name))
    kind = {"Content-Type": "application/merge-patch+json"}
    path = f"/apis/apps/v1/namespaces/{name}/deployments/steppe-actor"
    rolled = {"spec": {"template": {"metadata": {"annotations": {"steppe.dev/settings": "1"}}}}}
    other = {"spec": {"template": {"spec": {"serviceAccountName": "steppe-api"}}}}
    try:
        with plane.client(plane.account_token(name, "steppe-api")) as client:
            assert client.patch(path, json=rolled, headers=kind).status_code == 200

            def refused_change():  # a policy takes effect after a moment
                return (
                    answer := client.patch(f"{path}?dryRun=All", json=other, headers=kind)
                ).status_code == 422 and answer

            refused = until(refused_change, "the admission policy is in effect")
            assert client.patch(path, json=other, headers=kind).status_code == 422
            assert "may only roll out this Deployment" in refused.json()["message"]
            assert client.patch(path, json={"spec": {"replicas": 3}}, headers=kind).status_code == 422
    finally:
        for one in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            plane.kubectl("delete", one, "steppe-api-rolls-only")
