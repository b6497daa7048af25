"""Sign-in links and the sessions of browsers, each a small file next to the tokens.

A file exists while its link or session is valid: removing a link's file invalidates the link, and removing a session's file
revokes the session. So any process of the service's user can create links and end sessions while the service runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from steppe.core.io.atomic_files import write_atomic

SESSION_S = 12 * 3600.0
LINK_S = 15 * 60.0
MAX_SESSIONS = 200  # maximum number; the oldest session ends when one more begins
_ID = re.compile("[0-9a-f]{16}")
_TEXT = 200


@dataclass(frozen=True)
class Session:
    """A browser that is signed in. Times are seconds since the epoch."""

    id: str
    created_s: float
    until_s: float
    address: str
    browser: str


class Sessions:
    """Safe for several threads and processes."""

    def __init__(self, directory: Path) -> None:
        self._links, self._sessions = directory / "links", directory / "sessions"
        for created in (self._links, self._sessions):
            created.mkdir(parents=True, exist_ok=True, mode=0o700)

    def new_sign_in_link(self) -> str:
        """Create a code that signs in once, within LINK_S seconds."""
        self._sweep()
        code = secrets.token_urlsafe(24)
        _write(self._links / _digest(code), {"until_s": time.time() + LINK_S})
        return code

    def use_sign_in_link(self, code: str) -> bool:
        """Return whether the code was valid, and invalidate it."""
        path = self._links / _digest(code)
        try:
            until = json.loads(path.read_text())["until_s"]
            path.unlink()
        except (FileNotFoundError, ValueError, KeyError):
            return False
        return bool(until > time.time())

    def begin(self, address: str = "", browser: str = "") -> Session:
        """Create a session for a browser that signed in from an address."""
        now = time.time()
        session = Session(secrets.token_hex(8), now, now + SESSION_S, address[:_TEXT], browser[:_TEXT])
        _write(self._sessions / session.id, asdict(session))
        for oldest in self.list()[MAX_SESSIONS:]:
            self.end(oldest.id)
        return session

    def is_live(self, identity: str) -> bool:
        """Return whether a session has not been ended; the caller checks its expiry."""
        return _ID.fullmatch(identity) is not None and os.path.exists(self._sessions / identity)

    def list(self) -> list[Session]:
        """Return the sessions, newest first."""
        self._sweep()
        found = []
        for path in self._sessions.iterdir():
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                found.append(Session(**json.loads(path.read_text())))
        return sorted(found, key=lambda one: (one.created_s, one.id), reverse=True)

    def end(self, identity: str) -> bool:
        """End a session; return False if there is no such session."""
        if not self.is_live(identity):
            return False
        with contextlib.suppress(FileNotFoundError):
            (self._sessions / identity).unlink()
        return True

    def _sweep(self) -> None:
        """Remove expired links and sessions."""
        for path in (*self._links.iterdir(), *self._sessions.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                try:
                    keep = json.loads(path.read_text())["until_s"] > time.time()
                except (ValueError, KeyError, TypeError):
                    keep = path.name.startswith(".")  # another process is writing it
                if not keep:
                    path.unlink()


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


def _write(path: Path, content: dict[str, object]) -> None:
    write_atomic(path, json.dumps(content).encode())
    os.chmod(path, 0o600)
