"""The files of the page: which are served, how third-party files are fetched, and the message if they are missing."""

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

RECORDING = "/api/v1/runs/{}/evaluations/{}/recording"


@pytest.mark.integration
def test_only_the_files_of_the_page_are_served(api: httpx.Client):
    script = api.get("/page/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "script-src 'self'" in script.headers["content-security-policy"]
    again = api.get("/page/app.js", headers={"If-None-Match": script.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert api.get("/").headers["content-type"].startswith("text/html")
    for name in ("nothing.js", "../static.py", "..%2fstatic.py", "%2e%2e/app.py", "vendor/.uplot", ""):
        assert api.get(f"/page/{name}").status_code == 404, name


@pytest.mark.unit
def test_the_page_preloads_every_module():
    """Otherwise the browser would find a module's imports only after loading it."""
    page = (static.DIRECTORY / "index.html").read_text()
    requested = set(re.findall(r'<(?:script|link)[^>]* (?:src|href)="/page/([^"]+\.js)"', page))
    written = {str(path.relative_to(static.DIRECTORY)) for path in static.DIRECTORY.glob("*.js")}
    assert requested == written | {name for name in static.PARTS if name.endswith(".js")}
    assert 'src="/page/live.js" async' in page, "the stream is opened before the other modules are loaded"
    assert "import " not in (static.DIRECTORY / "live.js").read_text(), "it has no imports to wait for"


@pytest.mark.slow
@pytest.mark.integration
def test_only_recordings_of_the_run_are_served(api: httpx.Client, page_service: Served, ended: list[str]):
    evaluations = api.get(f"/api/v1/runs/{ended[0]}/evaluations").json()["evaluations"]
    number = next(one["number"] for one in evaluations if one["recording"])
    video = api.get(RECORDING.format(ended[0], number))
    assert video.headers["content-type"] == "image/gif"
    assert video.content.startswith(b"GIF8")
    for run, invalid in ((ended[0], number + 100_000), ("nobody", 1)):
        assert api.get(RECORDING.format(run, invalid)).status_code == 404
    (page_service.root / "runs" / "secret.gif").write_bytes(b"GIF8 secret")
    directory = RunDirectory(page_service.root / "runs" / ended[1])
    forged = EvaluationReport(
        run=ended[1], version=1, updates=1, env_steps=1, train_s=1.0, returns=[0.0], lengths=[1], return_mean=0.0,
        return_std=0.0, duration_s=1.0, weights_sha256="", recording="../../secret.gif",
    )  # fmt: skip
    assert api.get(RECORDING.format(ended[1], directory.store.post(EVALUATIONS, forged.record()))).status_code == 404


@pytest.mark.unit
def test_without_third_party_files_the_service_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    """Serve a registry with one package; yield the SHA-512 of the package."""
    directory_of_package = tmp_path / "registry" / "small" / "-"
    directory_of_package.mkdir(parents=True)
    with tarfile.open(directory_of_package / "small-1.0.0.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("package/dist/small.js")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"small"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "registry")
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://127.0.0.1:{server.server_port}/")
    yield base64.b64encode(hashlib.sha512((directory_of_package / "small-1.0.0.tgz").read_bytes()).digest()).decode()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.unit
def test_third_party_files_are_fetched_once_and_verified(fetching: ModuleType, registry: str, tmp_path: Path):
    target = tmp_path / "vendor"
    invalid = fetching.Part("small", "1.0.0", "A" * 88, {"dist/small.js": "s.js"}, target)
    with pytest.raises(SystemExit, match="is not what was pinned"):
        fetching.fetch(invalid)
    assert not target.exists()
    right = fetching.Part("small", "1.0.0", registry, {"dist/small.js": "s.js"}, target)
    fetching.fetch(right)
    assert (target / "s.js").read_bytes() == b"small"
    (tmp_path / "registry" / "small" / "-" / "small-1.0.0.tgz").unlink()
    fetching.fetch(right)
    assert all(len(base64.b64decode(part.sha512)) == 64 for part in fetching.PARTS)
