"""Access control without a service: tokens, sessions, hosts, origins and limits, at their exact boundaries."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from steppe.control.http import auth, sessions
from steppe.control.http.auth import (
    AccessControl,
    Caller,
    RequestLimits,
    RequestRefused,
    TokenBucket,
    TokenStore,
    header_map,
    public_names,
    require_safe_bind,
)
from steppe.core.contracts.errors import DamagedFile, UsageError

pytestmark = pytest.mark.unit

SECRET = "s" * 20  # the minimum length
STORED = {"read": "r" * 20, "control": "c" * 20, "admin": "a" * 20, "signing": SECRET}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until a test advances it."""
    clock = SimpleNamespace(monotonic_s=time.monotonic() + 1.0, wall_s=1_000_000.5)
    stopped = SimpleNamespace(monotonic=lambda: clock.monotonic_s, time=lambda: clock.wall_s)
    for module in (auth, sessions):
        monkeypatch.setattr(module, "time", stopped)
    return clock


@pytest.fixture
def keys(tmp_path: Path) -> TokenStore:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(STORED))
    return TokenStore(path)


def signed(purpose: str, text: str) -> str:
    """HMAC-SHA256 by the standard library, of the purpose and the text."""
    return hmac.new(SECRET.encode(), f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()


def bearer(scope: str) -> dict[str, str]:
    return {"authorization": f"Bearer {STORED[scope]}"}


def refusal(gate: AccessControl, address: str, method: str, headers: dict[str, str]) -> tuple[int, str]:
    with pytest.raises(RequestRefused) as refused:
        gate.authenticate(address, method, headers)
    assert str(refused.value) == refused.value.detail
    return refused.value.status, refused.value.code


def test_constants_and_immutability():
    """A session lasts half a day, a link a quarter of an hour; a body has at most 64 KiB."""
    assert (sessions.SESSION_S, sessions.LINK_S) == (43_200.0, 900.0)
    assert RequestLimits() == RequestLimits(
        burst=200.0, per_s=50.0, failed_attempts=10.0, failed_attempts_per_s=0.1, body_bytes=65_536
    )
    with pytest.raises(AttributeError):
        RequestLimits().burst = 1.0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Caller("x", "read").scope = "admin"  # type: ignore[misc]


@pytest.mark.parametrize(("scope", "allowed"), [("read", 1), ("control", 2), ("admin", 3)])
def test_a_scope_includes_the_weaker_scopes(scope, allowed):
    assert [Caller("x", scope).may(other) for other in ("read", "control", "admin")] == [True] * allowed + [False] * (
        3 - allowed
    )


def test_a_bucket_fills_at_its_rate_up_to_its_size(clock):
    bucket = TokenBucket(3.0, 2.0, updated_s=clock.monotonic_s)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    clock.monotonic_s += 0.25
    assert bucket.empty()
    assert not bucket.take(), "half a token is left"
    clock.monotonic_s += 0.25
    assert not bucket.empty()
    assert bucket.take(), "tokens from before the refusal are kept"
    assert not bucket.take(0.5)
    clock.monotonic_s += 100.0
    assert [bucket.take() for _ in range(4)] == [True, True, True, False], "the bucket is limited to its size"
    clock.monotonic_s += 1.0
    assert bucket.take(1.5)
    assert bucket.left == pytest.approx(0.5)
    clock.monotonic_s = 10.0
    early = TokenBucket(100.0, 1.0, updated_s=10.0)
    assert early.take(100.0)
    clock.monotonic_s = 25.0
    assert early.take(15.0), "one token per second"
    assert not early.take(0.5)
    clock.monotonic_s += 100.0
    assert not TokenBucket(1.0, 0.0).empty()
    assert TokenBucket(0.5, 9.0, updated_s=clock.monotonic_s - 9.0).empty(), "the bucket never holds one token"


def test_new_tokens_differ_and_only_the_owner_can_read_them(tmp_path):
    path = tmp_path / "tokens.json"
    keys = TokenStore(path)
    stored = json.loads(path.read_text())
    assert sorted(stored) == ["admin", "control", "read", "signing"]
    assert len(set(stored.values())) == 4
    assert min(map(len, stored.values())) >= 43, "32 random bytes"
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.tokens == {scope: stored[scope] for scope in ("read", "control", "admin")}
    path.chmod(0o644)
    assert TokenStore(path).tokens == keys.tokens, "tokens persist over a restart"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "3", json.dumps({**STORED, "signing": SECRET[1:]}), json.dumps({**STORED, "read": "r" * 19})]
    + [json.dumps({name: text for name, text in STORED.items() if name != left}) for left in STORED],
)
def test_a_damaged_token_file_raises_an_error(tmp_path, text):
    path = tmp_path / "tokens.json"
    path.write_text(text)
    with pytest.raises(DamagedFile, match="remove it"):
        TokenStore(path)


def test_a_token_identifies_its_scope(keys):
    for scope in ("read", "control", "admin"):
        assert keys.authenticate_token(STORED[scope]) == Caller(f"token:{scope}", scope)
    for wrong in ("", STORED["read"][1:], STORED["read"] + "r", SECRET, "ä"):
        assert keys.authenticate_token(wrong) is None


def test_a_link_signs_in_once_before_it_expires(keys, clock):
    first, second, third = (keys.new_sign_in_link() for _ in range(3))
    assert len({first, second, third}) == 3
    assert len(first) == 32, "24 random bytes"
    clock.wall_s += 899.5
    cookie = keys.sign_in(first)
    assert cookie is not None
    assert keys.sign_in(first) is None
    assert keys.sign_in("an unknown code") is None
    clock.wall_s += 0.5
    assert keys.sign_in(second) is None, "the link has expired"
    body, _, signature = cookie.rpartition(".")
    identity, _, until = body.rpartition(".")
    assert len(identity) == 16, "8 random bytes"
    assert int(until) == 1_044_100, "12 hours after signing in"
    assert signature == signed("session", body)
    assert keys.authenticate_cookie(cookie) == Caller(f"session:{identity}", "admin", session=identity)
    assert keys.csrf(identity) == signed("csrf", identity)


def test_a_cookie_is_valid_until_it_expires_and_only_with_its_signature(keys, clock):
    identity = keys.sessions.begin().id
    clock.wall_s = 500.0

    def cookie(body: str, purpose: str = "session") -> str:
        return f"{body}.{signed(purpose, body)}"

    assert keys.authenticate_cookie(cookie(f"{identity}.500")) == Caller(
        f"session:{identity}", "admin", session=identity
    )
    assert keys.authenticate_cookie(cookie(f"{identity}.499")) is None
    assert keys.authenticate_cookie(cookie(f"{identity}.500", "csrf")) is None
    assert keys.authenticate_cookie(cookie("0123456789abcdef.500")) is None, "there is no such session"
    for body in (f"{identity}.-600", f"{identity}.", f"{identity}.6e9", identity):
        assert keys.authenticate_cookie(cookie(body)) is None, body
    for wrong in ("", ".", f"{identity}.500", f"{identity}.500.", cookie(f"{identity}.500")[:-1], "ä.500.ä"):
        assert keys.authenticate_cookie(wrong) is None, wrong
    assert keys.sessions.end(identity)
    assert keys.authenticate_cookie(cookie(f"{identity}.500")) is None, "it was signed out"


def test_accepted_and_refused_credentials(keys):
    gate = AccessControl(keys)
    for text in (f"Bearer {STORED['read']}", f"bearer  {STORED['read']} "):
        assert gate.authenticate("a", "DELETE", {"authorization": text}).scope == "read"
    cookie = keys.sign_in(keys.new_sign_in_link())
    for headers in (
        {},
        {"authorization": ""},
        {"authorization": f"Basic {STORED['read']}"},
        {"authorization": STORED["read"]},
        {"authorization": "Bearer wrong", "cookie": f"steppe_session={cookie}"},
        {"cookie": f"other={cookie}"},
        {"cookie": f"the_session={cookie}"},
        {"cookie": "steppe_session=wrong"},
        {"cookie": "a]b=c; steppe_session"},
    ):
        assert refusal(gate, "b", "GET", headers) == (401, "token"), headers
    assert gate.authenticate("c", "GET", {"cookie": f"x=y; steppe_session={cookie}"}).session is not None


def test_a_cookie_needs_the_csrf_token_for_changes(keys):
    gate = AccessControl(keys)
    cookie = keys.sign_in(keys.new_sign_in_link())
    headers = {"cookie": f"steppe_session={cookie}"}
    identity, body = cookie.partition(".")[0], cookie.rpartition(".")[0]
    for method in ("GET", "HEAD", "OPTIONS"):
        assert gate.authenticate("a", method, headers).scope == "admin"
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert refusal(gate, "a", method, headers) == (403, "csrf")
        assert refusal(gate, "a", method, {**headers, "x-csrf-token": signed("session", body)}) == (403, "csrf")
        assert gate.authenticate("a", method, {**headers, "x-csrf-token": signed("csrf", identity)}).scope == "admin"
    assert gate.authenticate("a", "POST", bearer("control")).scope == "control", "a token needs no CSRF header"


def test_failed_attempts_are_limited_per_address_until_time_has_passed(keys, clock):
    gate = AccessControl(keys, limits=RequestLimits(failed_attempts=2.0, failed_attempts_per_s=0.5))
    for _ in range(5):
        assert refusal(gate, "a", "GET", {}) == (401, "token"), "a request without credentials is not a failed attempt"
    wrong = {"authorization": "Bearer wrong"}
    assert refusal(gate, "a", "GET", wrong) == (401, "token")
    assert refusal(gate, "a", "GET", {"cookie": "steppe_session=wrong"}) == (401, "token")
    assert refusal(gate, "a", "GET", wrong) == (429, "too_many_guesses")
    assert refusal(gate, "b", "GET", wrong) == (401, "token"), "attempts are counted per address"
    assert gate.authenticate("a", "GET", bearer("read")).scope == "read", "a valid token is always accepted"
    clock.monotonic_s += 2.5
    gate.count_failed_attempt("a")
    with pytest.raises(RequestRefused) as refused:
        gate.count_failed_attempt("a")
    assert (refused.value.status, refused.value.code) == (429, "too_many_guesses")


def test_the_request_rate_is_limited_per_caller(keys, clock):
    gate = AccessControl(keys, limits=RequestLimits(burst=2.0, per_s=1.0))
    assert [gate.authenticate("a", "GET", bearer("read")).name for _ in range(2)] == ["token:read"] * 2
    assert refusal(gate, "b", "GET", bearer("read")) == (429, "rate")
    assert gate.authenticate("a", "GET", bearer("admin")).name == "token:admin"
    clock.monotonic_s += 1.5
    assert gate.authenticate("a", "GET", bearer("read")).name == "token:read"


def test_only_the_newest_ten_thousand_addresses_are_remembered(keys):
    gate = AccessControl(keys, limits=RequestLimits(failed_attempts=1.0, failed_attempts_per_s=0.0))
    gate.count_failed_attempt("first")
    for number in range(10_000):
        gate.count_failed_attempt(str(number))
    with pytest.raises(RequestRefused):
        gate.count_failed_attempt("first")  # the 10,001st is kept as well
    with pytest.raises(RequestRefused):
        gate.count_failed_attempt("9999")
    gate.count_failed_attempt("one more")
    gate.count_failed_attempt("first")
    with pytest.raises(RequestRefused):
        gate.count_failed_attempt("9999")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "localhost:8000", "LocalHost", "[::1]:9", "lab.example", "LAB.example:1"]
)
def test_allowed_host_names_are_accepted(keys, host):
    gate = AccessControl(keys, ("Lab.Example",))
    gate.check_address({"host": host})
    for origin in (f"http://{host}", f"https://{host.upper()}"):
        gate.check_address({"host": host, "origin": origin, "sec-fetch-site": "same-origin"})
    gate.check_address({"host": host, "sec-fetch-site": "none"})


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "lab.example.evil", "localhost@evil.example", "[::1", "[::::]", ":80"]
)
def test_other_host_names_are_refused(keys, host):
    with pytest.raises(RequestRefused) as refused:
        AccessControl(keys, ("lab.example",)).check_address({} if host is None else {"host": host})
    assert (refused.value.status, refused.value.code) == (403, "host")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": origin}
        for origin in (
            "",
            "null",
            "http://localhost:81",
            "http://a.example:80",
            "ftp://localhost:80",
            "http://[",
            "localhost:80",
        )
    ]
    + [{"sec-fetch-site": site} for site in ("cross-site", "same-site", "")],
)
def test_other_origins_are_refused(keys, headers):
    with pytest.raises(RequestRefused) as refused:
        AccessControl(keys).check_address({"host": "localhost:80", **headers})
    assert (refused.value.status, refused.value.code) == (403, "origin")


def test_listening_on_other_addresses_needs_an_allowed_host_name():
    for host in ("127.0.0.1", "localhost", "::1"):
        require_safe_bind(host, ())
    require_safe_bind("0.0.0.0", ("lab.example",))
    for host in ("0.0.0.0", "::", "192.168.0.1"):
        with pytest.raises(UsageError, match="--allow-host"):
            require_safe_bind(host, ())


@pytest.mark.parametrize(
    ("host", "allowed", "names"),
    [
        ("127.0.0.1", (), ["127.0.0.1"]),
        ("127.0.0.1", ("lab.example",), ["127.0.0.1"]),
        ("lab.example", ("lab.example", "lab.local"), ["lab.example"]),
        ("192.168.0.1", ("lab.example", "lab.local"), ["lab.example", "lab.local"]),
        ("0.0.0.0", ("lab.example", "localhost"), ["127.0.0.1", "lab.example"]),
    ],
)
def test_links_contain_reachable_addresses(host, allowed, names):
    assert public_names(host, allowed) == names


def test_repeated_headers_are_resolved():
    """The last of repeated headers counts; a repeated Host is invalid, as a proxy might read the other one."""
    pairs = [(b"Host", b"localhost"), (b"X-One", b"1"), (b"x-one", b"\xe9"), (b"COOKIE", b"a=b")]
    assert header_map({"headers": pairs}) == {"host": "localhost", "x-one": "é", "cookie": "a=b"}
    assert header_map({"headers": [*pairs, (b"host", b"localhost")]})["host"] == ""
    assert header_map({"headers": []}) == {}
