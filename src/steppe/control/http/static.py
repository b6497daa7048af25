"""The page at `/` and its files, read once at the start: no part of a request becomes a path.

Videos of evaluations are served here too, by the number of the evaluation. The page itself is in page/;
scripts/fetch_page_parts.py puts its third-party parts into page/vendor.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Request, Response
from fastapi import Path as InPath

from steppe.control import models
from steppe.control.service import Service
from steppe.core.contracts.errors import RunNotFound

DIRECTORY = Path(__file__).parent / "page"
PARTS = ("vendor/htm-preact.js", "vendor/uplot.js", "vendor/uplot.css")
MISSING = "the page's third-party files are missing: run `make page` in the source checkout and restart; the API works without them"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

RunId = Annotated[str, InPath(pattern=models.RUN_ID)]
Number = Annotated[int, InPath(ge=1, lt=2**62)]


def is_page_complete() -> bool:
    """Return whether the third-party parts are in place."""
    return all((DIRECTORY / name).is_file() for name in PARTS)


def add_page(app: FastAPI, service: Service, prefix: str) -> None:
    """Add the routes of the page to the application."""
    files = {
        str(path.relative_to(DIRECTORY)): path.read_bytes() for path in DIRECTORY.rglob("*") if path.suffix in _TYPES
    }
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for name, content in files.items()}
    complete = is_page_complete()

    def respond(request: Request, name: str) -> Response:
        headers = {"ETag": tags[name], "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=headers)

    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        return respond(request, "index.html") if complete else Response(MISSING, 503, media_type="text/plain")

    @app.get("/page/{name:path}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise RunNotFound("the page has no file with that name")
        return respond(request, name)

    @app.get(f"{prefix}/runs/{{run}}/evaluations/{{number}}/recording", include_in_schema=False)
    def recording(run: RunId, number: Number) -> Response:
        return Response(_read_recording(service, run, number), media_type="image/gif")


def _read_recording(service: Service, run: str, number: int) -> bytes:
    found = service.list_evaluations(run, number - 1, 1).evaluations
    name = found[0].recording if found and found[0].number == number else None
    path = service.root / run / "recordings" / Path(name or "none").name
    if name is None or path.is_symlink() or not path.is_file():
        raise RunNotFound("there is no recording of that evaluation")
    return path.read_bytes()
