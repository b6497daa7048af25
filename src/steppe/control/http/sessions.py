"""Sign-in links and the sessions of browsers, each a small file beside the tokens.

A file is there while its link or session is good: whoever removes the file of a link has used it, and a session is revoked by
removing its file. So links can be made, and sessions ended, by any process of the service's user while the service runs.
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
MAX_SESSIONS = 200  # sessions; the oldest one ends when there is one more
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
    """May be used by several threads and processes."""

    def __init__(self, folder: Path) -> None:
        self._links, self._sessions = folder / "links", folder / "sessions"
        for made in (self._links, self._sessions):
            made.mkdir(parents=True, exist_ok=True, mode=0o700)

    def new_sign_in_link(self) -> str:
        """A code that signs in once, within LINK_S."""
        self._sweep()
        code = secrets.token_urlsafe(24)
        _write(self._links / _digest(code), {"until_s": time.time() + LINK_S})
        return code

    def use_sign_in_link(self, code: str) -> bool:
        """Whether the code was good; it is not any more."""
        path = self._links / _digest(code)
        try:
            until = json.loads(path.read_text())["until_s"]
            path.unlink()
        except (FileNotFoundError, ValueError, KeyError):
            return False
        return bool(until > time.time())

    def begin(self, address: str = "", browser: str = "") -> Session:
        """A new session, of a browser that signed in from an address."""
        now = time.time()
        made = Session(secrets.token_hex(8), now, now + SESSION_S, address[:_TEXT], browser[:_TEXT])
        _write(self._sessions / made.id, asdict(made))
        for oldest in self.list()[MAX_SESSIONS:]:
            self.end(oldest.id)
        return made

    def is_live(self, identity: str) -> bool:
        """Whether a session has not been ended; when it expires is for its holder to know."""
        return _ID.fullmatch(identity) is not None and os.path.exists(self._sessions / identity)

    def list(self) -> list[Session]:
        """Newest first."""
        self._sweep()
        found = []
        for path in self._sessions.iterdir():
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                found.append(Session(**json.loads(path.read_text())))
        return sorted(found, key=lambda one: (one.created_s, one.id), reverse=True)

    def end(self, identity: str) -> bool:
        """Sign a browser out; False when there is no such session."""
        if not self.is_live(identity):
            return False
        with contextlib.suppress(FileNotFoundError):
            (self._sessions / identity).unlink()
        return True

    def _sweep(self) -> None:
        """Remove what has expired."""
        for path in (*self._links.iterdir(), *self._sessions.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                try:
                    good = json.loads(path.read_text())["until_s"] > time.time()
                except (ValueError, KeyError, TypeError):
                    good = path.name.startswith(".")  # somebody writes it just now
                if not good:
                    path.unlink()


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


def _write(path: Path, content: dict[str, object]) -> None:
    write_atomic(path, json.dumps(content).encode())
    os.chmod(path, 0o600)
