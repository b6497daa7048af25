"""Exit codes, streams, precedence and start-up of the real executable. Expected values are written by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "gymnasium", "numba", "ray", "numpy", "pydantic", "rich", "tensorboard"}


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_start_up_imports_nothing_heavy(words):
    script = """
        import sys
        sys.argv[0] = "steppe"
        from steppe.cli.main import entry
        try:
            entry()
        except SystemExit as stop:
            assert not stop.code, stop.code
        print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout
    assert not HEAVY & set(done.stderr.split())


def test_help_names_every_command(steppe):
    done = steppe("--help")
    assert done.returncode == 0
    listed = done.stdout.split("Commands:")[1]
    commands = ("train", "eval", "runs", "watch", "stop", "algos", "envs", "doctor", "config")
    for command in (
        *commands,
        "resume",
        "checkpoints",
        "rerun",
        "reproduce",
        "diff",
        "params",
        "node",
        "kafka",
        "role",
    ):
        assert f"\n  {command} " in listed
    assert "..." not in listed


def test_the_readme_lists_every_command(steppe):
    listed = steppe("--help").stdout.split("Commands:")[1]
    commands = set(re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE))
    assert {"ctl", "role", "node", "params", "kafka", "mcp"} <= commands
    (row,) = re.findall(r"^\| Commands \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {name.partition(" ")[0] for name in re.findall(r"`([^`]+)`", row)} == commands


@pytest.mark.parametrize("words", [["train"], ["config", "show"]])
def test_help_of_flags_comes_from_config_fields(steppe, words):
    done = steppe(*words, "--help")
    text = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "--actors N Number of actors or workers; auto chooses by a short measurement. [default: 1]" in text
    assert "--runtime NAME Where the roles run: inline, processes, mpi, ray, kafka, or" in text
    assert "One of single, sync, async, workers." in text
    assert "--record-arrivals Async: record the order of learned segments" in text
    assert "--init-from RUN Start with the weights of another run" in text
    assert "--restarts N Maximum automatic resumes after the learner has died. [default: 0]" in text
    assert "ENV <str> Gymnasium or PettingZoo id" in text or "ENV Gymnasium or PettingZoo id" in text


def test_version(steppe):
    assert steppe("--version").stdout == f"steppe {version('steppe')}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "CartPole-v1", "-s", "learning_rat=1"], "Did you mean 'learning_rate'?"),
        (["train", "CartPole-v1", "-s", "evaluation.episode=1"], "Did you mean 'evaluation.episodes'?"),
        (["train", "CartPole-v1", "--algo", "pop"], "Did you mean 'ppo'?"),
        (["train", "CartPole-v1", "--runtime", "threads"], "runtime='threads'"),
        (["train", "CartPole-v1", "--mode", "asynk"], "mode='asynk'"),
        (["train", "CartPole-v1", "--actors", "0"], "actors=0"),
        (["train", "CartPole-v1", "--actors", "two"], "actors='two'"),
        (["train", "CartPole-v1", "--mode", "single", "--actors", "3"], "mode 'single' has one actor"),
        (["train", "CartPole-v1", "--device", "gpu"], "device='gpu'"),
        (["train", "CartPole-v1", "--seed", "-1"], "seed=-1"),
        (["train", "CartPole-v1", "-s", "clip"], "key=value"),
        (["train", "CartPole-v1", "--actors", "2", "-s", "actors=3"], "actors is set twice"),
        (["train", "CartPole-v1", "--config", "none.toml"], "cannot read none.toml"),
        (["train"], "no environment given"),
        (["train", "CartPole-v1", "--actor", "2"], "--actors"),
        (["tran"], "'train'"),
        (["algos", "pop"], "Did you mean 'ppo'?"),
        (["envs", "CartPool"], "Did you mean 'CartPole-v1'?"),
        (["watch", "nothing"], "there is no run 'nothing'"),
        (["stop", "nothing"], "there is no run 'nothing'"),
        (["eval", "nothing", "--episodes", "0"], "--episodes"),
        (["role", "actor", "--run", "r", "-s", "learning_rate=1"], "accepts kafka.* settings only"),
        (["role", "manager", "--run", "r", "-s", "seed=1"], "accepts kafka.* settings only"),
        (["train", "CartPole-v1", "-s", "clip=1e308"], "agent.clip=1e+308: input should be less than or equal to 10"),
        (["train", "CartPole-v1", "-s", "hidden=[1000000000]"], "input should be less than or equal to 65536"),
        (["train", "CartPole-v1", "-s", f"hidden={[65_536] * 8}"], "lower what needs most"),
    ],
)
def test_usage_error_is_one_paragraph_with_code_2_and_writes_nothing(steppe, tmp_path, words, said):
    done = steppe(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_toml_is_named(steppe, tmp_path):
    (tmp_path / "bad.toml").write_text("steps = = 3")
    done = steppe("train", "--config", "bad.toml")
    assert done.returncode == 2
    assert "bad.toml is not valid TOML" in done.stderr


def test_precedence_is_flags_environment_file_defaults(steppe, tmp_path):
    (tmp_path / "e.toml").write_text(
        'env = "CartPole-v1"\nsteps = 10\nseed = 1\nactors = 2\n[agent]\nclip = 0.3\nepochs = 7\n[flow]\nmax_lag = 3\n'
    )
    done = steppe(
        *[
            "config",
            "show",
            "--config",
            "e.toml",
            "--actors",
            "4",
            "-s",
            "epochs=9",
            "--target-return",
            "-200",
            "--json",
        ],
        STEPPE_SEED="2",
        STEPPE_ACTORS="3",
        STEPPE_AGENT__CLIP="0.4",
        STEPPE_RUNS="elsewhere",
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    expected = {
        "env": ("CartPole-v1", "e.toml"),
        "steps": (10, "e.toml"),
        "seed": (2, "environment"),
        "actors": (4, "flag"),
        "target_return": (-200.0, "flag"),
        "agent.clip": (0.4, "environment"),
        "agent.epochs": (9, "flag"),
        "agent.gamma": (0.99, "default"),
        "flow.max_lag": (3, "e.toml"),
        "flow.window_s": (0.02, "default"),
    }
    assert {key: (shown[key]["value"], shown[key]["source"]) for key in expected} == expected


def test_numbers_may_be_written_as_in_toml(steppe):
    shown = json.loads(steppe("config", "show", "X-v0", "--steps", "2e6", "--seed", "1_000", "--json").stdout)
    assert shown["steps"]["value"] == 2_000_000
    assert shown["seed"]["value"] == 1_000


def test_name_of_digits_stays_text(steppe):
    shown = json.loads(steppe("config", "show", "X-v0", "--name", "42", "--json").stdout)
    assert shown["name"]["value"] == "42"


def test_unknown_environment_variable_is_an_error(steppe):
    done = steppe("config", "show", "CartPole-v1", STEPPE_SEEED="1")
    assert done.returncode == 2
    assert done.stderr == "steppe: unknown key 'seeed' in the variable STEPPE_SEEED. Did you mean 'seed'?\n"


def test_module_in_the_working_directory_is_found_and_shadows_nothing(steppe, tmp_path):
    (tmp_path / "mine.py").write_text("import gymnasium\n\ndef pole():\n    return gymnasium.make('CartPole-v1')\n")
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong module')\n")
    words = ("--actors", "2", "--envs", "2", "--steps", "64", "-s", "segment_steps=16", "-s", "evaluation.episodes=1")
    done = steppe("train", "mine:pole", *words, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["env"] == "mine:pole"


def test_config_show_works_without_an_environment_and_follows_the_algorithm(steppe):
    shown = json.loads(steppe("config", "show", "--algo", "dqn", "--json").stdout)
    assert shown["env"] == {"value": None, "source": "not given"}
    assert shown["agent.batch_size"] == {"value": 64, "source": "default"}
    assert "agent.clip" not in shown


def test_config_show_as_a_table(steppe):
    done = steppe("config", "show", "CartPole-v1", "-s", "hidden=[8, 8]")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "[8, 8]" in rows["agent.hidden"]
    assert "flag" in rows["agent.hidden"]
    assert "Width of each hidden layer;" in rows["agent.hidden"]
    assert "default" in rows["agent.gamma"]
    assert "\x1b" not in done.stdout


def test_algos(steppe):
    rows = {row["name"]: row for row in json.loads(steppe("algos", "--json").stdout)}
    assert rows["dqn"]["actions"] == ["discrete"]
    assert rows["ppo"]["actions"] == ["discrete", "multi-discrete", "continuous"]
    table = steppe("algos").stdout
    assert "Proximal policy optimization" in table
    keys = {row["key"]: row for row in json.loads(steppe("algos", "ppo", "--json").stdout)}
    assert keys["clip"]["default"] == 0.2


def test_envs(steppe):
    rows = json.loads(steppe("envs", "cartpole", "--json").stdout)
    by_id = {row["id"]: row for row in rows}
    assert set(by_id) == {"CartPole-v1", "phys2d/CartPole-v1"}
    assert by_id["CartPole-v1"] == {
        "id": "CartPole-v1",
        "max_episode_steps": 500,
        "solved_at": 475.0,
        "native_vector": True,
        "needs": None,
    }
    assert "CartPole-v0" in steppe("envs", "cartpole", "--all").stdout
    assert "steppe/Identity-v0" in steppe("envs", "identity").stdout


@pytest.mark.slow
def test_doctor_reports_this_machine_ready(steppe):
    done = steppe("doctor", "--json")
    report = json.loads(done.stdout)
    found = {finding["what"]: finding for finding in report["findings"]}
    assert done.returncode == 0
    assert report["ok"] is True
    assert found["torch"]["details"] == version("torch")
    assert found["python"]["details"].startswith(".".join(map(str, sys.version_info[:3])))


def test_doctor_says_what_is_broken_and_exits_1(steppe, tmp_path):
    (tmp_path / "occupied").write_text("a file where runs should be")
    done = steppe("doctor", "--quick", STEPPE_RUNS=str(tmp_path / "occupied"))
    assert done.returncode == 1
    assert "Not ready to train: fix runs." in done.stdout
    assert "STEPPE_RUNS" in done.stdout


def test_an_unexpected_exception_keeps_its_traceback():
    script = """
        import sys
        from steppe.cli import main
        def broken():
            raise ZeroDivisionError("not foreseen")
        main.app.command("broken")(broken)
        sys.argv = ["steppe", "broken"]
        main.entry()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "ZeroDivisionError: not foreseen" in done.stderr


def test_environment_fault_shows_its_traceback():
    script = """
        import sys
        from steppe.cli import main
        from steppe.core.contracts.errors import EnvironmentFault
        def broken():
            raise EnvironmentFault("Mine-v0 raised at step 7", {"traceback": "File mine.py, line 3"})
        main.app.command("broken")(broken)
        sys.argv = ["steppe", "broken"]
        main.entry()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "File mine.py, line 3\nsteppe: Mine-v0 raised at step 7\n"
