"""Access middleware around the whole application, HTTP and WebSocket: only requests that auth.py admits pass."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from steppe.control.http.auth import (
    SAFE_METHODS,
    SECURITY_HEADERS,
    AccessControl,
    RequestRefused,
    header_map,
    is_cross_site,
)
from steppe.control.http.connections import Connections
from steppe.control.http.sessions import SESSION_S

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PUBLIC_PATHS = ("/healthz", "/readyz")  # probes need no token, but an allowed Host
SIGN_IN = "/sign-in"
_NOT_SIGNED_IN_PAGE = """<!doctype html><html lang="en"><meta name="viewport" content="width=device-width">
<title>Sign in · Steppe</title><h1>You are not signed in</h1>
<p>Open the link that <code>steppe serve</code> printed when it started. It works once, within 15 minutes;
<code>steppe serve --sign-in</code> prints a new one while the service runs.</p></html>"""
_REFRESH_PAGE = """<!doctype html><html lang="en"><meta http-equiv="refresh" content="0; url=/">
<title>Steppe</title><a href="/">Open Steppe</a></html>"""


def problem_document(status: int, code: str, detail: str) -> dict[str, Any]:
    """Return an RFC 9457 problem document."""
    titles = {
        400: "Bad request", 401: "Not authenticated", 403: "Forbidden", 404: "Not found", 405: "Method not allowed",
        408: "Request timeout",
        409: "Conflict", 412: "Precondition failed", 413: "Content too large", 422: "Invalid request", 429: "Too many requests",
        500: "Internal error", 503: "Unavailable",
    }  # fmt: skip
    kind = f"https://steppe.invalid/problems/{code}"
    return {"type": kind, "title": titles.get(status, "Error"), "status": status, "detail": detail, "code": code}


class AccessMiddleware:
    """ASGI middleware that refuses requests which access control does not admit."""

    def __init__(self, app: Application, gate: AccessControl, connections: Connections | None = None) -> None:
        self.app, self.gate, self.connections = app, gate, connections

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers = header_map(scope)
        try:
            navigating = _is_navigation(scope, headers)
            self.gate.check_address(headers, navigating=navigating)
            self._require_capacity(scope)
            if scope["type"] == "http" and scope["path"] == SIGN_IN:
                return await self._sign_in(scope, headers, send)
            if navigating and is_cross_site(headers):
                return await _send_refresh_page(send, {})
            self._admit(scope, headers)
            body = receive
            if scope["type"] == "http":
                body = _receive_empty_body if scope["path"] in PUBLIC_PATHS else await self._body(headers, receive)
        except RequestRefused as refusal:
            return await send_refusal(scope, send, refusal)
        return await self.app(scope, body, _add_security_headers(send))

    def _require_capacity(self, scope: MutableMapping[str, Any]) -> None:
        """Refuse reads while only the reserve is free: many readers must not block a `stop` or a probe."""
        if self.connections is None or not self.connections.only_reserve_left:
            return
        reads = scope["type"] == "websocket" or scope["method"] in SAFE_METHODS
        if reads and scope["path"] not in PUBLIC_PATHS:
            raise RequestRefused(503, "crowded", "too many connections are busy: try again in a moment")

    def _admit(self, scope: MutableMapping[str, Any], headers: dict[str, str]) -> None:
        if scope["path"] in PUBLIC_PATHS and scope["type"] == "http":
            return
        address = (scope.get("client") or ("unknown", 0))[0]
        scope["steppe.caller"] = self.gate.authenticate(address, scope.get("method", "GET"), headers)

    async def _sign_in(self, scope: MutableMapping[str, Any], headers: dict[str, str], send: Send) -> None:
        """Exchange a one-time code for a session, and redirect to the page; a code in a URL works only once."""
        address = (scope.get("client") or ("unknown", 0))[0]
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"))
        code = query.get("code", [""])[0] if scope["method"] == "GET" else ""
        cookie = self.gate.keys.sign_in(code, address, headers.get("user-agent", ""))
        if cookie is None:
            self.gate.count_failed_attempt(address)
            raise RequestRefused(
                401, "link", "this link was used already or has expired: steppe serve --sign-in prints a new one"
            )
        extra = {"set-cookie": set_cookie_header(self.gate, scope, headers, cookie, SESSION_S)}
        if is_cross_site(headers):
            return await _send_refresh_page(send, extra)
        return await _send_response(send, 303, b"", {"location": "/", **extra})

    async def _body(self, headers: dict[str, str], receive: Receive) -> Receive:
        """Read the whole body, up to the limit."""
        limit = self.gate.limits.body_bytes
        too_large = RequestRefused(413, "too_large", f"the maximum size of a body is {limit} bytes")
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise RequestRefused(400, "length", "Content-Length is not a number")
        if int(length) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self.gate.limits.body_s):
                body = await _read_body(receive, limit)
        except TimeoutError:
            raise RequestRefused(
                408, "slow", f"the body was not received within {self.gate.limits.body_s:g} s"
            ) from None
        if body is None:
            raise too_large
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay


def set_cookie_header(
    gate: AccessControl, scope: Mapping[str, Any], headers: Mapping[str, str], value: str, seconds: float
) -> str:
    """Return Set-Cookie for a session; Secure if the browser uses TLS, directly or through a proxy."""
    tls = scope.get("scheme") == "https" or headers.get("x-forwarded-proto", "").lower() == "https"
    secure = "; Secure" if tls else ""
    return f"{gate.cookie}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds:.0f}{secure}"


def _is_navigation(scope: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Return whether a person follows a link to the page or to sign-in; that link may be on any page."""
    opens_document = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return opens_document and scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in ("/", SIGN_IN)


async def _send_refresh_page(send: Send, headers: dict[str, str]) -> None:
    """Make the browser request again by itself.

    On a redirect from another site's link it would not send a SameSite=Strict cookie.
    """
    await _send_response(send, 200, _REFRESH_PAGE.encode(), {"content-type": "text/html; charset=utf-8", **headers})


async def _receive_empty_body() -> Message:
    """Return an empty body for a probe, whose real body is not read."""
    return {"type": "http.request", "body": b"", "more_body": False}


async def _read_body(receive: Receive, limit: int) -> bytes | None:
    """Return a body; None if it exceeds the limit."""
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            return None
    return b"".join(parts)


async def send_refusal(scope: MutableMapping[str, Any], send: Send, refusal: RequestRefused) -> None:
    """Send a problem document, or reject a WebSocket before it opens."""
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008, "reason": refusal.code})
    extra = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
    extra |= {"retry-after": "10"} if refusal.status in (429, 503) else {}
    extra |= {"connection": "close"} if refusal.status == 408 else {}
    body, kind = (
        json.dumps(problem_document(refusal.status, refusal.code, refusal.detail)).encode(),
        "application/problem+json",
    )
    if refusal.status == 401 and scope["path"] in ("/", SIGN_IN) and "text/html" in header_map(scope).get("accept", ""):
        # For a person, HTML instead of a problem document.
        body, kind = (
            _NOT_SIGNED_IN_PAGE.encode(),
            "text/html; charset=utf-8",
        )
    return await _send_response(send, refusal.status, body, {"content-type": kind, **extra})


async def _send_response(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    every = {**SECURITY_HEADERS, **headers, "content-length": str(len(body))}
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in every.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _add_security_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            known = {name for name, _ in message["headers"]}
            extra = [
                (name.encode(), value.encode())
                for name, value in SECURITY_HEADERS.items()
                if name.encode() not in known
            ]
            message = {**message, "headers": [*message["headers"], *extra]}
        await send(message)

    return wrapped
