"""Refusals of the real service: wrong tokens, hosts, origins, paths and sizes; and the permissions of each scope."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from steppe.control.http.auth import (
    AccessControl,
    RequestLimits,
    RequestRefused,
    TokenStore,
    public_names,
    require_safe_bind,
)
from steppe.core.contracts.errors import UsageError
from tests.support.service import SERVE, SHORT, Served, make, stop_service_and_runs, until
from tests.support.warm_host import WarmHost

pytestmark = pytest.mark.integration

RUNS = "/api/v1/runs"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, service_host: WarmHost) -> Iterator[Served]:
    """One service for all that must be refused; the last test uses up what may be guessed."""
    service = Served(tmp_path_factory.mktemp("served"), host=service_host)
    service.start()
    yield service
    stop_service_and_runs(service)


def link_of(served: Served) -> str:
    return f"/sign-in?code={TokenStore(served.root / 'runs' / '.control' / 'tokens.json').new_sign_in_link()}"


def cookie_of(served: Served) -> str:
    return f"steppe_session_{urlsplit(served.address).port}"


def code_of(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    assert answer.json()["status"] == answer.status_code
    return str(answer.json()["code"])


def test_every_route_and_method_needs_a_token(served: Served, api: httpx.Client):
    paths = api.get("/api/v1/openapi.json").json()["paths"]
    with served.client(None) as anonymous:
        for path, methods in paths.items():
            for method in methods:
                answer = anonymous.request(method, path.format(run="x", operation="0" * 32))
                assert answer.status_code == 401, (method, path)
        for path in ("/", "/metrics", "/version", "/api/v1/openapi.json", "/api/v1/session", "/nowhere"):
            assert anonymous.get(path).status_code == 401, path
        assert anonymous.get("/healthz").json() == {"status": "ok"}
        assert anonymous.get("/readyz").status_code == 200


def test_each_scope_permits_its_operations_and_refusals_are_audited(served: Served, api: httpx.Client):
    run = make(api, SHORT, start=False)
    with served.client("read") as reader, served.client("control") as controller:
        assert reader.get(RUNS).status_code == 200
        assert code_of(reader.post(RUNS, json=SHORT)) == "scope"
        assert code_of(reader.post(f"{RUNS}/{run}/start")) == "scope"
        assert code_of(controller.delete(f"{RUNS}/{run}")) == "scope"
        assert code_of(controller.post(f"{RUNS}/{run}/kill")) == "scope"
        assert code_of(controller.get("/api/v1/audit")) == "scope"
        assert controller.post(f"{RUNS}/{run}/stop").status_code == 202
    entries = api.get("/api/v1/audit").json()["entries"]
    found = [(entry["who"], entry["operation"], entry["run"], entry["outcome"].partition(":")[0]) for entry in entries]
    assert found == [
        ("token:control", "stop_run", run, "done"),
        ("token:control", "get_audit", None, "refused"),
        ("token:control", "kill_run", run, "refused"),
        ("token:control", "delete_run", run, "refused"),
        ("token:read", "start_run", run, "refused"),
        ("token:read", "create_run", None, "refused"),
        ("token:admin", "create_run", None, "done"),
    ]


def test_foreign_host_names_and_origins_are_refused(served: Served, api: httpx.Client):
    for host in (
        "evil.example",
        "127.0.0.1.evil.example",
        "",
        "localhost@evil.example",
        "evil.example@localhost",
        "a:b@127.0.0.1",
    ):
        assert code_of(api.get(RUNS, headers={"Host": host})) == "host"
    assert httpx.get(served.address + "/healthz", headers={"Host": "evil.example"}).status_code == 403
    port = urlsplit(served.address).port
    assert api.get(RUNS, headers={"Host": f"localhost:{port}"}).status_code == 200
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example", "file://"):
        assert code_of(api.get(RUNS, headers={"Origin": origin})) == "origin"
    assert api.get(RUNS, headers={"Origin": served.address}).status_code == 200
    assert code_of(api.get(RUNS, headers={"Sec-Fetch-Site": "cross-site"})) == "origin"


def test_a_link_signs_in_once_and_changes_need_the_csrf_token(served: Served):
    with httpx.Client(base_url=served.address) as page:
        entered = page.get(served.link)
        assert entered.status_code == 303
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert page.get(RUNS).status_code == 200
        assert code_of(page.post(RUNS, json={**SHORT, "start": False})) == "csrf"
        csrf = page.get("/api/v1/session").json()["csrf"]
        assert code_of(page.post(RUNS, json=SHORT, headers={"X-CSRF-Token": csrf[::-1]})) == "csrf"
        made = page.post(RUNS, json={**SHORT, "start": False}, headers={"X-CSRF-Token": csrf})
        assert made.status_code == 201
        forged = page.cookies[cookie_of(served)]
    assert httpx.get(served.link).status_code == 401, "a link works only once"
    name, until, signature = forged.rsplit(".", 2)
    longer = f"{cookie_of(served)}={name}.{int(until) + 10**6}.{signature}"
    assert httpx.get(served.address + RUNS, headers={"Cookie": longer}).status_code == 401


def test_a_sign_in_link_on_another_site_works(served: Served):
    clicked = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    with httpx.Client(base_url=served.address, headers=clicked) as page:
        entered = page.get(link_of(served))
        assert (entered.status_code, entered.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert 'content="0; url=/"' in entered.text, "after a redirect the browser would not send the SameSite cookie"
        assert page.get(RUNS).status_code == 403, "only the page may be opened from another site"
        assert 'content="0; url=/"' in page.get("/").text
        assert page.get(RUNS, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200
        assert page.post("/", headers=clicked).status_code == 403
    framed = {**clicked, "Sec-Fetch-Dest": "iframe"}
    assert httpx.get(served.address + link_of(served), headers=framed).status_code == 403


def test_cookies_are_secure_behind_tls(served: Served):
    with httpx.Client(base_url=served.address) as page:
        assert "Secure" not in page.get(link_of(served)).headers["set-cookie"]
        behind = page.get(link_of(served), headers={"X-Forwarded-Proto": "https"})
        assert behind.headers["set-cookie"].endswith("; Secure")


def test_sessions_are_listed_signed_out_and_revoked(served: Served, api: httpx.Client):
    with httpx.Client(base_url=served.address) as one, httpx.Client(base_url=served.address) as other:
        for page in (one, other):
            page.get(link_of(served))
        names = [page.get("/api/v1/session").json()["name"].removeprefix("session:") for page in (one, other)]
        listed = {found["id"]: found for found in one.get("/api/v1/sessions").json()["sessions"]}
        assert set(names) <= set(listed)
        assert [listed[name]["current"] for name in names] == [True, False]
        first = api.get("/api/v1/sessions", params={"limit": 1}).json()
        rest = api.get("/api/v1/sessions", params={"cursor": first["next"]}).json()
        assert [*first["sessions"], *rest["sessions"]] == api.get("/api/v1/sessions").json()["sessions"]
        address = served.address.replace("http", "ws") + "/api/v1/stream"
        kept = {"Cookie": f"{cookie_of(served)}={other.cookies[cookie_of(served)]}"}
        with connect(address, additional_headers=kept) as stream:
            stream.recv(60)
            csrf = {"X-CSRF-Token": one.get("/api/v1/session").json()["csrf"]}
            assert one.delete(f"/api/v1/sessions/{names[1]}", headers=csrf).status_code == 204
            with pytest.raises(ConnectionClosed) as closed:
                until(lambda: stream.recv(60) is None, "the stream of an ended session ends")
            assert closed.value.rcvd.code == 1008
        assert other.get(RUNS).status_code == 401
        assert one.delete("/api/v1/session").status_code == 403, "signing out needs the CSRF token like other changes"
        assert one.delete("/api/v1/session", headers=csrf).status_code == 204
        assert one.get(RUNS).status_code == 401
    assert api.delete(f"/api/v1/sessions/{names[0]}").status_code == 404
    assert code_of(api.delete("/api/v1/session")) == "session"
    with served.client("control") as controller:
        assert code_of(controller.get("/api/v1/sessions")) == "scope"
        assert code_of(controller.delete(f"/api/v1/sessions/{names[0]}")) == "scope"
    found = [entry["operation"] for entry in api.get("/api/v1/audit").json()["entries"]]
    assert {"sign_out", "revoke_session"} <= set(found)


@pytest.mark.slow
def test_a_running_service_can_print_a_new_link(served: Served, tmp_path: Path):
    def ask(runs: Path) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"STEPPE_RUNS": str(runs)}
        words = [sys.executable, "-c", SERVE, "serve", "--sign-in"]
        return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120)

    link = ask(served.root / "runs").stdout.rsplit(" ", 1)[1].strip()
    assert link.startswith(served.address)
    assert httpx.get(link).status_code == 303
    nobody = ask(tmp_path)
    assert (nobody.returncode, nobody.stdout) == (3, "")
    assert "no service is running" in nobody.stderr


def test_a_valid_token_is_accepted_after_many_failed_attempts():
    """Access control alone: failed attempts from the same address do not block valid tokens and sessions."""
    keys = TokenStore(Path(tempfile.mkdtemp()) / "tokens.json")
    gate = AccessControl(keys, limits=RequestLimits(failed_attempts=2, failed_attempts_per_s=0.0), port=8_900)
    codes = []
    for _ in range(4):
        with pytest.raises(RequestRefused) as refused:
            gate.authenticate("a", "GET", {"authorization": "Bearer guess"})
        codes.append(refused.value.status)
    assert codes == [401, 401, 429, 429]
    assert gate.authenticate("a", "GET", {"authorization": f"Bearer {keys.tokens['read']}"}).scope == "read"
    mine = f"steppe_session_8900={keys.sign_in(keys.new_sign_in_link())}"
    others = "steppe_session_8901=x; broken\u00e9[=; "
    assert gate.authenticate("a", "GET", {"cookie": others + mine}).scope == "admin", (
        "cookies of other services are ignored"
    )
    with pytest.raises(RequestRefused):
        gate.authenticate("a", "GET", {"cookie": mine.replace("8900", "8901")})


def test_the_request_rate_of_a_caller_is_limited():
    """Access control alone, with a bucket that is not refilled, so that the speed of this machine does not matter."""
    gate = AccessControl(TokenStore(Path(tempfile.mkdtemp()) / "tokens.json"), limits=RequestLimits(burst=3, per_s=0.0))
    headers = {"authorization": f"Bearer {gate.keys.tokens['read']}"}
    assert [gate.authenticate("a", "GET", headers).scope for _ in range(3)] == ["read"] * 3
    with pytest.raises(RequestRefused, match="too many requests") as refused:
        gate.authenticate("b", "GET", headers)
    assert refused.value.status == 429
    other = {"authorization": f"Bearer {gate.keys.tokens['admin']}"}
    assert gate.authenticate("a", "GET", other).scope == "admin", "other callers are not limited"


def test_paths_commands_and_modules_are_refused(served: Served, api: httpx.Client):
    (served.root / "secret").write_text("hidden")
    before = len(api.get(RUNS).json()["runs"])
    for run in ("..%2f..%2fsecret", "%2e%2e", "..", ".control", "a%00b", "%2fetc"):
        for rest in ("", "/logs", "/metrics"):
            assert api.get(f"{RUNS}/{run}{rest}").status_code in (404, 422)
    run = make(api, SHORT, start=False)
    for source in ("../run", "..%2frun", "/etc/passwd", "run.json"):
        assert api.get(f"{RUNS}/{run}/logs", params={"source": source}).status_code in (404, 422)
    (served.root / "runs" / "link").symlink_to(served.root / "runs" / run)
    assert api.get(f"{RUNS}/link").status_code == 404
    for change in (
        {"env": "os:system"}, {"env": "steppe.envs.toy.builtin:CountingEnv"}, {"algo": "os:system"}, {"run_dir": "/tmp/x"},
        {"name": "../x"}, {"device": "cuda"}, {"init_from": "/tmp"}, {"agent": {"network": "os:system"}},
        {"environment": {"wrappers": ["os:system"]}}, {"environment": {"kwargs": {"path": "/etc"}}}, {"runtime": "os:f"},
        {"ray": {"address": "evil:1"}}, {"flow": {"actor_device": "cuda"}}, {"actors": 10_000}, {"steps": -1},
    ):  # fmt: skip
        answer = api.post(RUNS, json={**SHORT, **change})
        assert code_of(answer) in ("invalid", "config_error"), change
        assert answer.status_code == 422
    assert len(api.get(RUNS).json()["runs"]) == before + 1


def test_large_bodies_are_refused(served: Served, api: httpx.Client):
    assert code_of(api.post(RUNS, content=b"x" * 70_000)) == "too_large"

    def endless():
        for _ in range(80):
            yield b"x" * 1_024

    assert code_of(api.post(RUNS, content=endless())) == "too_large"
    parts = urlsplit(served.address)
    with socket.create_connection((parts.hostname, parts.port)) as raw:
        raw.sendall(
            f"POST {RUNS} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {served.token('admin')}\r\n"
            f"Content-Length: {10**15}\r\n\r\n".encode()
        )
        assert b" 413 " in raw.recv(4_096)


def test_security_headers_and_file_permissions(served: Served, api: httpx.Client):
    headers = api.get(RUNS).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers
    private = served.root / "runs" / ".control"
    assert stat.S_IMODE((private / "tokens.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    found = api.get(RUNS).text + json.dumps(dict(api.get("/metrics").headers))
    assert served.token("read") not in found


def test_websockets_have_the_same_access_control(served: Served):
    address = served.address.replace("http", "ws") + "/api/v1/stream"
    good = {"Authorization": f"Bearer {served.token('read')}"}
    for headers, origin in (
        ({}, None),
        ({"Authorization": "Bearer x"}, None),
        (good, "https://evil.example"),
        (good, "null"),
    ):
        with pytest.raises(InvalidStatus) as refused, connect(address, additional_headers=headers, origin=origin):
            pass
        assert refused.value.response.status_code == 403
    parts = urlsplit(served.address)
    with socket.create_connection(
        (parts.hostname, parts.port)
    ) as raw:  # DNS rebinding: another host name with this address
        raw.sendall(
            f"GET /api/v1/stream HTTP/1.1\r\nHost: evil.example:{parts.port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nOrigin: http://evil.example:{parts.port}\r\nSec-WebSocket-Version: 13\r\n"
            f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: {good['Authorization']}\r\n\r\n".encode()
        )
        assert b" 403 " in raw.recv(4_096)
    with connect(address, additional_headers=good, origin=served.address) as socket_:
        assert json.loads(socket_.recv(30))["type"] == "snapshot"


def test_a_wildcard_address_needs_an_allowed_host_name():
    with pytest.raises(UsageError, match="--allow-host"):
        require_safe_bind("0.0.0.0", ())
    require_safe_bind("0.0.0.0", ("trainer.example",))
    require_safe_bind("127.0.0.1", ())


def test_links_contain_reachable_addresses():
    assert public_names("0.0.0.0", ("trainer.example", "localhost")) == ["127.0.0.1", "trainer.example"]
    assert public_names("::", ("trainer.example",)) == ["::1", "trainer.example"]
    assert public_names("10.0.0.5", ("trainer.example",)) == ["trainer.example"], (
        "the address itself is not an allowed host name"
    )
    assert public_names("10.0.0.5", ("trainer.example", "10.0.0.5")) == ["10.0.0.5"]
    assert public_names("localhost", ()) == ["localhost"]


def test_failed_attempts_are_limited(served: Served, api: httpx.Client):
    answers = [
        httpx.get(served.address + RUNS, headers={"Authorization": f"Bearer guess-{number}"}).status_code
        for number in range(14)
    ]
    assert 429 in answers
    assert set(answers) == {401, 429}
    assert api.get(RUNS).status_code == 200, "a valid token is still accepted"
