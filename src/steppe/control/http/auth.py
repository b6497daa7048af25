"""Access control for every HTTP method and WebSocket: Host, Origin, token or session, scope, limits.

Tokens, one per scope, are created at the first start and stored in a file that only its owner can read. A person signs
in with a one-time link, which sets a signed session cookie (sessions.py); changes by cookie also need the CSRF token
that the page reads from the API.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from steppe.control.http.sessions import Sessions
from steppe.core.contracts.errors import DamagedFile, UsageError
from steppe.core.io.atomic_files import write_atomic

SCOPES = ("read", "control", "admin")  # each includes those before it
LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "steppe_session"
CSRF_HEADER = "x-csrf-token"
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard addresses to listen on, and addresses that reach them
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class RequestRefused(Exception):
    """A request is refused; status, code and detail are sent to the caller."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail


@dataclass(frozen=True)
class Caller:
    """An authenticated caller."""

    name: str
    scope: str
    session: str | None = None

    def may(self, scope: str) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


@dataclass
class TokenBucket:
    """Token bucket: `size` requests at once, then `per_s` per second."""

    size: float
    per_s: float
    left: float = field(init=False)
    updated_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.left = self.size

    def take(self, cost: float = 1.0) -> bool:
        now = time.monotonic()
        self.left = min(self.size, self.left + (now - self.updated_s) * self.per_s)
        self.updated_s = now
        if self.left < cost:
            return False
        self.left -= cost
        return True

    def empty(self) -> bool:
        return min(self.size, self.left + (time.monotonic() - self.updated_s) * self.per_s) < 1.0


@dataclass(frozen=True)
class RequestLimits:
    """Per caller: requests at once and per second; failed attempts per address; bytes and seconds of a body."""

    burst: float = 200.0
    per_s: float = 50.0
    failed_attempts: float = 10.0
    failed_attempts_per_s: float = 0.1
    body_bytes: int = 64 << 10
    body_s: float = 20.0


class TokenStore:
    """The tokens by scope, and the key that signs sessions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            tokens = {name: secrets.token_urlsafe(32) for name in (*SCOPES, "signing")}
            write_atomic(path, json.dumps(tokens, indent=2).encode())
        os.chmod(path, 0o600)
        try:
            found = json.loads(path.read_text())
            self.tokens = {scope: str(found[scope]) for scope in SCOPES}
            self._signing = str(found["signing"]).encode()
        except (ValueError, KeyError, TypeError):
            raise DamagedFile(f"{path} is damaged: remove it, and the next start creates new tokens") from None
        if min(map(len, (*self.tokens.values(), self._signing.decode()))) < 20:
            raise DamagedFile(f"{path} has a token that is too short: remove it, and the next start creates new tokens")
        self.sessions = Sessions(path.parent)

    def authenticate_token(self, token: str) -> Caller | None:
        """Return the caller with this token, or None. Compares with every token, each in constant time."""
        matches = [hmac.compare_digest(token.encode(), known.encode()) for known in self.tokens.values()]
        scope = next((scope for scope, matches_token in zip(self.tokens, matches, strict=True) if matches_token), None)
        return None if scope is None else Caller(f"token:{scope}", scope)

    def new_sign_in_link(self) -> str:
        """Create a code that signs in once, within 15 minutes."""
        return self.sessions.new_sign_in_link()

    def sign_in(self, code: str, address: str = "", browser: str = "") -> str | None:
        """Return the cookie's value for a valid unused code; None for any other."""
        if not self.sessions.use_sign_in_link(code):
            return None
        session = self.sessions.begin(address, browser)
        body = f"{session.id}.{int(session.until_s)}"
        return f"{body}.{self._sign('session', body)}"

    def authenticate_cookie(self, value: str) -> Caller | None:
        body, _, signature = value.rpartition(".")
        identity, _, until = body.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign("session", body).encode()):
            return None
        if not until.isdigit() or int(until) < time.time() or not self.sessions.is_live(identity):
            return None
        return Caller(f"session:{identity}", "admin", session=identity)

    def csrf(self, session: str) -> str:
        """Return the CSRF token that a page must send with every change."""
        return self._sign("csrf", session)

    def _sign(self, purpose: str, text: str) -> str:
        return hmac.new(self._signing, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()


class AccessControl:
    """Checks requests by address and headers alone (names in lower case)."""

    def __init__(
        self,
        keys: TokenStore,
        hosts: tuple[str, ...] = (),
        limits: RequestLimits | None = None,
        port: int | None = None,
    ) -> None:
        """`port` is the service's own; it is part of the cookie's name, as browsers share cookies between ports."""
        self.keys, self.limits = keys, limits or RequestLimits()
        self.cookie = COOKIE if port is None else f"{COOKIE}_{port}"
        self.hosts = frozenset(host.lower() for host in (*LOOPBACK, *hosts))
        self._requests: dict[str, TokenBucket] = {}
        self._failed_attempts: dict[str, TokenBucket] = {}

    def check_address(self, headers: Mapping[str, str], *, navigating: bool = False) -> None:
        """Refuse foreign Host names (DNS rebinding) and foreign origins (cross-site requests).

        With `navigating`, a link on another page may lead here.
        """
        name = _hostname(headers.get("host", ""))
        if name not in self.hosts:
            raise RequestRefused(403, "host", "this host name is not allowed: see steppe serve --allow-host")
        origin = headers.get("origin")
        if origin is not None and not self._is_own_origin(origin, headers.get("host", "")):
            raise RequestRefused(403, "origin", "requests from pages of other origins are refused")
        if not navigating and is_cross_site(headers):
            raise RequestRefused(403, "origin", "requests from pages of other origins are refused")

    def authenticate(self, address: str, method: str, headers: Mapping[str, str]) -> Caller:
        """Return the caller; raises RequestRefused. With a cookie, unsafe methods also need the CSRF token.

        A valid token is always accepted, however many failed attempts came from the same address before.
        """
        caller = self._authenticate_headers(headers)
        if caller is None:
            if "authorization" in headers or "cookie" in headers:
                self.count_failed_attempt(address)
            raise RequestRefused(
                401,
                "token",
                "a token is required (Authorization: Bearer …); steppe serve prints the path of the file with the tokens",
            )
        if caller.session is not None and method not in SAFE_METHODS:
            sent = headers.get(CSRF_HEADER, "")
            if not hmac.compare_digest(sent.encode(), self.keys.csrf(caller.session).encode()):
                raise RequestRefused(
                    403,
                    "csrf",
                    f"a change with a session cookie needs the header {CSRF_HEADER}, with the value from /api/v1/session",
                )
        if not _bucket(self._requests, caller.name, self.limits.burst, self.limits.per_s).take():
            raise RequestRefused(429, "rate", "too many requests: wait before the next one")
        return caller

    def count_failed_attempt(self, address: str) -> None:
        """Count a wrong token or sign-in code; raises RequestRefused after too many."""
        if not _bucket(
            self._failed_attempts, address, self.limits.failed_attempts, self.limits.failed_attempts_per_s
        ).take():
            raise RequestRefused(
                429, "too_many_guesses", "too many wrong tokens or codes from this address: try again later"
            )

    def _authenticate_headers(self, headers: Mapping[str, str]) -> Caller | None:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind:
            return self.keys.authenticate_token(token.strip()) if kind.lower() == "bearer" else None
        for pair in headers.get("cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self.cookie and (caller := self.keys.authenticate_cookie(value)) is not None:
                return caller
        return None

    def _is_own_origin(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def require_safe_bind(host: str, allowed: tuple[str, ...]) -> None:
    """Raise UsageError if the service would be reachable by others without an allowed host name."""
    if host not in LOOPBACK and not allowed:
        raise UsageError(
            f"--host {host} is reachable from other machines: give its name with --allow-host NAME, or use 127.0.0.1"
        )


def public_names(host: str, allowed: tuple[str, ...]) -> list[str]:
    """Return the names under which a service on `host` answers; first one that works on this machine, if any."""
    if host in WILDCARDS:
        return [WILDCARDS[host], *(name for name in allowed if name not in LOOPBACK)]
    return [host] if host in (*LOOPBACK, *allowed) else list(allowed)


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Return whether the browser reports that a page of another origin caused the request."""
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)


def _hostname(host: str) -> str:
    """Return the name in a Host header; empty if it has more than a name and a port, such as user:password@."""
    if not _HOST.fullmatch(host):
        return ""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _bucket(buckets: dict[str, TokenBucket], key: str, size: float, per_s: float) -> TokenBucket:
    while len(buckets) > 10_000 and key not in buckets:
        del buckets[next(iter(buckets))]
    return buckets.setdefault(key, TokenBucket(size, per_s))


def header_map(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return a request's headers; the last of repeated ones, but an empty Host if that is repeated."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        found[key] = "" if key == "host" and key in found else value.decode("latin-1")
    return found
