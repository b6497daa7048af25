"""Write docs/openapi.json from the routes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from steppe.control.factory import make_local_service
from steppe.control.http.app import make_app
from steppe.control.http.auth import AccessControl, TokenStore

with tempfile.TemporaryDirectory() as scratch:
    os.environ["STEPPE_RUNS"] = scratch
    service = make_local_service()
    schema = make_app(service, AccessControl(TokenStore(service.private / "tokens.json"))).openapi()
    service.close()
target = Path(__file__).parents[1] / "docs" / "openapi.json"
target.write_text(json.dumps(schema, indent=1, ensure_ascii=False) + "\n")
