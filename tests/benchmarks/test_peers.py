"""Peer libraries in separate environments, with made-up ones that print their arguments."""

from __future__ import annotations

import json
import math
import textwrap

import pytest
from suite import measuring
from suite.measuring import RunError, measure
from suite.peers import peer, python

pytestmark = pytest.mark.integration

SCRIPT = """
import json, sys
asked = sys.argv[1:]
print("loading")
print(json.dumps({
    "peer": "tiny", "task": asked[0], "steps": 600, "seconds": 2.0, "steps_per_s": 300.0,
    "settings": {"asked": asked, "python": sys.prefix}, "versions": {"python": "3"},
    "extra": {"train_s": 1.5, "reached": asked[0] != "never"},
}))
"""


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """Directories of peers and their environments; one small peer without dependencies."""
    monkeypatch.setattr(measuring, "QUIET_CORES", math.inf)
    peers, venvs = tmp_path / "peers", tmp_path / "venvs"
    peers.mkdir()
    (peers / "tiny.py").write_text(textwrap.dedent(SCRIPT))
    (peers / "tiny.lock").write_text("# nothing\n")
    return {"peers": peers, "venvs": venvs}


def test_a_peer_runs_in_a_separate_environment(homes):
    cases = [
        peer("whole", "tiny", "ppo", steps=50, settings=["a=1", "b=2"], **homes),
        peer("solved", "tiny", "solve", value="train_s", **homes),
        peer("unsolved", "tiny", "never", value="train_s", **homes),
        peer("missing", "nobody", "ppo", **homes),
        peer("wordless", "tiny", "ppo", value="share", **homes),
    ]
    rows = measure(cases, 2)
    used = rows["whole"].runs[1].reading.settings
    assert used["asked"] == "ppo --seed 2 --steps 50 --set a=1 b=2".split()
    assert used["python"] == str(homes["venvs"] / "tiny")
    assert rows["whole"].values == [300.0, 300.0]
    assert rows["solved"].values == [1.5, 1.5]
    assert rows["unsolved"].values == [math.inf, math.inf]
    assert "no nobody.lock" in rows["missing"].error
    assert rows["wordless"].error == "printed no share"
    assert json.dumps(rows["unsolved"].record(), allow_nan=False)


def test_the_environment_is_rebuilt_when_its_lock_changes(homes):
    interpreter = python("tiny", **homes)
    ready = homes["venvs"] / "tiny" / "ready"
    made = ready.stat().st_mtime_ns
    assert python("tiny", **homes) == interpreter
    assert ready.stat().st_mtime_ns == made
    (homes["peers"] / "tiny.lock").write_text("no-such-thing-as-this @ file:///nowhere\n")
    with pytest.raises(RunError, match="environment of tiny could not be made"):
        python("tiny", **homes)
