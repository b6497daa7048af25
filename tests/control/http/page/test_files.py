"""The files of the page: what is served and what is not, where they come from, and what is said where they are missing."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import http.server
import importlib
import io
import re
import tarfile
import threading
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from steppe.control.factory import make_local_service
from steppe.control.http import static
from steppe.control.http.app import make_app
from steppe.control.http.auth import AccessControl, TokenStore
from steppe.core.contracts.reports import EvaluationReport
from steppe.core.contracts.transport import EVALUATIONS
from steppe.records.run_directory import RunDirectory
from tests.support.browser import ROOT
from tests.support.service import Served

FILM = "/api/v1/runs/{}/evaluations/{}/recording"


@pytest.mark.integration
def test_files_are_served_by_name_and_nothing_else_is(api: httpx.Client):
    script = api.get("/page/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "script-src 'self'" in script.headers["content-security-policy"]
    again = api.get("/page/app.js", headers={"If-None-Match": script.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert api.get("/").headers["content-type"].startswith("text/html")
    for name in ("nothing.js", "../static.py", "..%2fstatic.py", "%2e%2e/app.py", "vendor/.uplot", ""):
        assert api.get(f"/page/{name}").status_code == 404, name


@pytest.mark.unit
def test_the_page_asks_for_every_module_at_once():
    """What a module imports would otherwise be found out only when that module has come."""
    page = (static.DIRECTORY / "index.html").read_text()
    asked = set(re.findall(r'<(?:script|link)[^>]* (?:src|href)="/page/([^"]+\.js)"', page))
    written = {str(path.relative_to(static.DIRECTORY)) for path in static.DIRECTORY.glob("*.js")}
    assert asked == written | {name for name in static.PARTS if name.endswith(".js")}
    assert 'src="/page/live.js" async' in page, "the stream is opened before the rest has come"
    assert "import " not in (static.DIRECTORY / "live.js").read_text(), "it waits for no other module"


@pytest.mark.slow
@pytest.mark.integration
def test_films_are_those_of_the_run_alone(api: httpx.Client, house: Served, ended: list[str]):
    judged = api.get(f"/api/v1/runs/{ended[0]}/evaluations").json()["evaluations"]
    number = next(one["number"] for one in judged if one["recording"])
    film = api.get(FILM.format(ended[0], number))
    assert film.headers["content-type"] == "image/gif"
    assert film.content.startswith(b"GIF8")
    for run, wrong in ((ended[0], number + 100_000), ("nobody", 1)):
        assert api.get(FILM.format(run, wrong)).status_code == 404
    (house.root / "runs" / "secret.gif").write_bytes(b"GIF8 secret")
    directory = RunDirectory(house.root / "runs" / ended[1])
    forged = EvaluationReport(
        run=ended[1], version=1, updates=1, env_steps=1, train_s=1.0, returns=[0.0], lengths=[1], return_mean=0.0,
        return_std=0.0, duration_s=1.0, weights_sha256="", recording="../../secret.gif",
    )  # fmt: skip
    assert api.get(FILM.format(ended[1], directory.store.post(EVALUATIONS, forged.record()))).status_code == 404


@pytest.mark.unit
def test_a_service_without_the_parts_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(static, "DIRECTORY", tmp_path)
    (tmp_path / "index.html").write_text("<p>page</p>")
    assert not static.is_page_complete()
    service, keys = make_local_service(), TokenStore(tmp_path / "tokens.json")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(service, AccessControl(keys)))
        headers = {"Authorization": f"Bearer {keys.tokens['read']}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            return await client.get("/")

    answer = asyncio.run(ask())
    service.close()
    assert answer.status_code == 503
    assert "make page" in answer.text


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("fetch_page_parts")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A registry with one package; what it should be by its sha512."""
    folder = tmp_path / "registry" / "small" / "-"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "small-1.0.0.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("package/dist/small.js")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"small"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "registry")
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://127.0.0.1:{server.server_port}/")
    yield base64.b64encode(hashlib.sha512((folder / "small-1.0.0.tgz").read_bytes()).digest()).decode()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.unit
def test_parts_are_fetched_once_and_only_as_pinned(fetching: ModuleType, registry: str, tmp_path: Path):
    place = tmp_path / "vendor"
    wrong = fetching.Part("small", "1.0.0", "A" * 88, {"dist/small.js": "s.js"}, place)
    with pytest.raises(SystemExit, match="is not what was pinned"):
        fetching.fetch(wrong)
    assert not place.exists()
    right = fetching.Part("small", "1.0.0", registry, {"dist/small.js": "s.js"}, place)
    fetching.fetch(right)
    assert (place / "s.js").read_bytes() == b"small"
    (tmp_path / "registry" / "small" / "-" / "small-1.0.0.tgz").unlink()
    fetching.fetch(right)
    assert all(len(base64.b64decode(part.sha512)) == 64 for part in fetching.PARTS)
