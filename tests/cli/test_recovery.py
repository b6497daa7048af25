"""`resume`, `checkpoints`, `rerun`, `reproduce`, `diff` and `--init-from` with the real executable, on its own runs."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.integration

SMALL = (
    "--runtime", "inline", "--envs", "4", "-s", "hidden=[8]", "-s", "segment_steps=16", "-s", "epochs=1",
    "-s", "minibatch_size=32", "-s", "evaluation.episodes=2", "-s", "evaluation.every_steps=1000000",
)  # fmt: skip
KEYS = (
    "run, state, reason, env, algo, runtime, mode, actors, envs, seed, env_steps, episodes, updates, version, weights_sha256, "
    "train_return_mean, eval_return_mean, eval_return_std, eval_episodes, wall_s, train_s, time_to_target_s, steps_per_s, "
    "lag_mean, lag_max, dropped_segments, refused_segments, actor_restarts, time_shares, resume, profile, agent_steps, eval_agent_returns, eval_terminated_share"
).split(", ")


@pytest.fixture
def cli_host(torch_host):
    return torch_host


def train(steppe, name, *words):
    done = steppe("train", "CartPole-v1", "--name", name, "--steps", "640", *SMALL, "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_resume_with_more_steps(steppe, tmp_path):
    first = train(steppe, "pole", "-s", "checkpoint.every_episodes=5")
    assert set(first) == set(KEYS)
    assert first["resume"] is None
    done = steppe("resume", "pole")
    assert done.returncode == 2
    assert "is complete (steps_done): give steps" in done.stderr
    done = steppe("resume", "pole", "--steps", "1280", "--json")
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)
    assert set(second) == set(KEYS)
    assert (second["run"], second["resume"]) == ("pole", "exact")
    assert second["env_steps"] >= 1280 > first["env_steps"]
    done = steppe("resume", "pole", "--steps", "1600")
    assert "resume: exact" in done.stdout
    assert "WARNING" not in done.stderr


@pytest.mark.slow
def test_damaged_checkpoints_are_listed_and_reported(steppe, tmp_path):
    train(steppe, "pole", "-s", "checkpoint.every_episodes=5", "-s", "checkpoint.keep=2")
    listed = json.loads(steppe("checkpoints", "pole", "--json").stdout)
    older, newest, best = listed
    assert (older["best"], newest["best"], best["best"]) == (False, False, True)
    assert all(row["healthy"] and row["damage"] is None and row["size_bytes"] > 0 for row in listed)
    assert older["number"] < newest["number"]
    assert older["env_steps"] < newest["env_steps"]
    state = tmp_path / "runs" / "pole" / "checkpoints" / f"{newest['number']:08d}" / "state.bin"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    (row,) = [row for row in json.loads(steppe("checkpoints", "pole", "--json").stdout) if not row["healthy"]]
    assert row["number"] == newest["number"]
    assert "state.bin" in row["damage"]
    table = steppe("checkpoints", "pole").stdout
    assert table.splitlines()[0].split() == ["number", "age", "size", "steps", "version", "return", "health"]
    assert "(best)" in table
    assert "good" in table
    assert "state.bin is damaged" in " ".join(table.split())
    done = steppe("resume", "pole", "--steps", "1280", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resume"] == "exact"
    (last_word,) = [line for line in done.stderr.splitlines() if line.startswith("steppe: WARNING")]
    assert "state.bin is damaged" in last_word
    assert "\nWARNING: skipped a checkpoint" in "\n" + done.stderr, "said from the beginning on, too"


@pytest.mark.long
@pytest.mark.slow
def test_rerun_compares_weights_and_sets_exit_code(steppe, tmp_path):
    recorded = train(steppe, "free", "--mode", "async", "--actors", "2", "--record-arrivals", "--seed", "4")
    done = steppe("rerun", "free", "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["weights_sha256"] == again["expected_sha256"] == recorded["weights_sha256"]
    assert (again["run"], again["rerun_of"], again["matched"]) == ("free-rerun", "free", True)
    log = tmp_path / "runs" / "free" / "arrivals.jsonl"
    *takes, mark = log.read_text().splitlines()
    forged = json.loads(mark)
    forged["mark"]["weights_sha256"] = "0" * 64
    log.write_text("\n".join([*takes, json.dumps(forged), ""]))
    done = steppe("rerun", "free")
    assert done.returncode == 1
    assert "NOT matched" in done.stdout
    assert "the weights are not those of free" in done.stderr
    train(steppe, "lockstep")
    done = steppe("rerun", "lockstep")
    assert (done.returncode, done.stdout) == (2, "")
    assert "lockstep has no log of arrivals" in done.stderr


@pytest.mark.slow
def test_reproduce_shows_traceback_and_sets_exit_code(steppe, tmp_path):
    failing = ("steppe/Failing-v0", "--name", "bad", "-s", "environment.kwargs={at_step = 40}")
    done = steppe("train", *failing, "--steps", "10000", *SMALL)
    assert done.returncode == 1
    assert "reproduce it with: steppe reproduce bad --fault 1" in done.stderr
    done = steppe("reproduce", "bad", "--fault", "1")
    assert done.returncode == 0, done.stderr
    assert "RuntimeError: this environment was made to fail" in done.stderr
    assert "Traceback" in done.stderr
    assert "reproduced: RuntimeError at step" in done.stdout
    seen = json.loads(steppe("reproduce", "bad", "--json").stdout)
    assert seen["matched"] is True
    assert seen["found"]["place"] == seen["recorded"]["place"]
    record = tmp_path / "runs" / "bad" / "run.json"
    changed = json.loads(record.read_text())
    changed["config"] |= {"env": "CartPole-v1", "environment.kwargs": {}}
    record.write_text(json.dumps(changed))
    done = steppe("reproduce", "bad")
    assert done.returncode == 1
    assert "NOT reproduced" in done.stdout
    assert "note: the environments could not be restored and began new episodes" in done.stdout
    done = steppe("reproduce", "bad", "--fault", "7")
    assert done.returncode == 2
    assert "has no fault 7" in done.stderr


@pytest.mark.slow
def test_init_from_and_diff(steppe, tmp_path):
    source = train(steppe, "source")
    heir = train(steppe, "heir", "--init-from", "source", "-s", "learning_rate=0.01")
    found = json.loads(steppe("diff", "source", "heir", "--json").stdout)
    assert found["runs"] == ["source", "heir"]
    assert set(found["config"]) == {"init_from", "agent.learning_rate"}
    assert found["config"]["init_from"][1] == {"value": "source", "source": "flag"}
    assert found["config"]["agent.learning_rate"][1] == {"value": 0.01, "source": "flag"}
    assert found["config"]["agent.learning_rate"][0]["source"] == "default"
    assert found["results"]["weights_sha256"] == [source["weights_sha256"], heir["weights_sha256"]]
    assert found["versions"] == found["hardware"] == {}
    table = steppe("diff", "source", "heir").stdout
    assert "0.01 (flag)" in table
    assert "do not differ" in steppe("diff", "heir", "heir").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resume", "nothing"], "there is no run 'nothing'"),
        (["checkpoints", "nothing"], "there is no run 'nothing'"),
        (["rerun", "nothing"], "there is no run 'nothing'"),
        (["reproduce", "nothing"], "there is no run 'nothing'"),
        (["diff", "nothing", "more"], "there is no run 'nothing'"),
        (["diff", "nothing"], "Missing argument"),
        (["resume", "nothing", "--steps", "0"], "--steps"),
        (["train", "CartPole-v1", "--init-from", "nothing"], "there is no run 'nothing'"),
        (["train", "CartPole-v1", "--mode", "sync", "--record-arrivals"], "record_arrivals is for mode 'async'"),
        (["train", "CartPole-v1", "--record-arrivals"], "record_arrivals is for mode 'async', not 'sync'"),
        (["train", "CartPole-v1", "--restarts", "-1"], "restarts=-1"),
    ],
)  # fmt: skip
def test_usage_error_is_one_paragraph_with_code_2(steppe, tmp_path, words, said):
    done = steppe(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
