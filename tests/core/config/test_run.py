"""Configuration: layers and their sources, mistakes in one sentence, and values that survive being written down."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.ppo.config import PPOConfig
from steppe.core.config.agent import AgentConfig
from steppe.core.config.algorithm_table import config_class
from steppe.core.config.run import (
    DEFAULT_STEPS,
    SECTIONS,
    flatten,
    from_environ,
    from_pairs,
    from_toml,
    parse_value,
    resolve_config,
    unflatten,
)
from steppe.core.contracts.errors import ConfigError

pytestmark = pytest.mark.unit


def made(**layer):
    return resolve_config(("flag", {"env": "CartPole-v1", **layer})).config


class TestLayers:
    def test_the_last_one_wins_and_sources_are_kept(self):
        resolved = resolve_config(
            ("file.toml", {"env": "CartPole-v1", "seed": 1, "actors": 2, "learning_rate": 0.1}),
            ("STEPPE_*", {"seed": 2, "agent.gamma": 0.5}),
            ("flag", {"seed": 3}),
        )
        config, sources = resolved.config, resolved.sources
        assert (config.seed, config.actors, config.agent.learning_rate, config.agent.gamma) == (3, 2, 0.1, 0.5)
        assert (sources["seed"], sources["actors"], sources["agent.gamma"]) == ("flag", "file.toml", "STEPPE_*")
        assert sources["agent.learning_rate"] == "file.toml"
        assert sources["flow.max_lag"] == "default"

    def test_every_value_has_a_source(self):
        resolved = resolve_config(("flag", {"env": "CartPole-v1"}))
        assert resolved.sources.keys() == flatten(resolved.config).keys()

    def test_a_bare_name_is_a_hyperparameter_where_no_field_has_it(self):
        config = made(learning_rate=0.25, seed=9)
        assert (config.agent.learning_rate, config.seed) == (0.25, 9)

    def test_sections_by_dots(self):
        config = made(
            **{"flow.max_lag": 3, "evaluation.episodes": 7, "checkpoint.keep": 2, "environment.frame_stack": 4}
        )
        found = (
            config.flow.max_lag,
            config.evaluation.episodes,
            config.checkpoint.keep,
            config.environment.frame_stack,
        )
        assert found == (3, 7, 2, 4)

    def test_the_algorithm_decides_which_keys_there_are(self):
        assert isinstance(made(algo="dqn", batch_size=3).agent, DQNConfig)
        assert isinstance(made().agent, PPOConfig)
        with pytest.raises(ConfigError, match="unknown key 'batch_size'"):
            made(algo="ppo", batch_size=3)

    def test_an_algorithm_of_the_users(self):
        config = made(algo="tests.core.config.test_run:Mine", temperature=0.5)
        assert config.agent.temperature == 0.5
        assert config_class("tests.core.config.test_run:Mine") is Mine.Config
        with pytest.raises(ConfigError, match="has no inner class `Config`"):
            made(algo="tests.core.config.test_run:NotMine")


class Mine:
    class Config(AgentConfig):
        temperature: float = 1.0


class NotMine:
    pass


class TestMistakes:
    @pytest.mark.parametrize(
        ("layer", "words"),
        [
            ({"learning_rat": 1}, r"unknown key 'learning_rat'\. Did you mean 'learning_rate'\?"),
            ({"flow.max_leg": 1}, r"unknown key 'flow\.max_leg'\. Did you mean 'flow\.max_lag'\?"),
            ({"zzzzqqq": 1}, r"unknown key 'zzzzqqq'\.$"),
            ({"agent": {}}, "unknown key 'agent'"),
            ({"flow": {}}, "unknown key 'flow'"),
            ({"a.b.c": 1}, "unknown key"),
            ({"algo": "pppo"}, r"there is no algorithm 'pppo'; there are: a2c, a3c, dhc, dqn, ppo, r2d2, .*, q-lambda\. Did you mean 'ppo'\?"),
            ({"runtime": "proceses"}, "runtime='proceses'"),
            ({"mode": "fast"}, "mode='fast'"),
            ({"actors": 0}, "actors=0: .*greater than 0"),
            ({"actors": "two"}, "actors='two'"),
            ({"seed": -1}, "seed=-1"),
            ({"seed": 2**63}, "seed="),
            ({"gamma": 1.5}, r"agent\.gamma=1\.5"),
            ({"learning_rate": float("nan")}, r"agent\.learning_rate=nan"),
            ({"target_return": float("inf")}, "target_return=inf"),
            ({"hidden": [64, 0]}, r"agent\.hidden\.1=0"),
            ({"device": "gpu"}, "device='gpu': must be auto, cpu, cuda or cuda:n"),
            ({"device": "cuda:x"}, "device='cuda:x'"),
            ({"device": "cpu:0"}, "device='cpu:0'"),
            ({"flow.window_s": -1}, r"flow\.window_s=-1"),
            ({"actors": 3, "mode": "single"}, "mode 'single' has one actor, not 3"),
            ({"flow.ahead": 2}, r"flow\.ahead=2"),
            ({"flow.ahead": -1}, r"flow\.ahead=-1"),
            ({"flow.ahead": 1, "mode": "single"}, r"flow\.ahead=1 is for mode 'sync', not 'single'"),
            ({"flow.ahead": 1, "mode": "async"}, r"flow\.ahead=1 is for mode 'sync', not 'async'"),
        ],
    )  # fmt: skip
    def test_one_sentence_with_the_key_and_the_value(self, layer, words):
        with pytest.raises(ConfigError, match=words) as raised:
            made(**layer)
        assert "\n" not in str(raised.value)

    def test_an_environment_is_required(self):
        with pytest.raises(ConfigError, match="env is required"):
            resolve_config(("flag", {}))

    def test_nothing_changes_afterwards(self):
        config = made()
        with pytest.raises(ValueError, match="frozen"):
            config.seed = 3
        with pytest.raises(ValueError, match="frozen"):
            config.flow.max_lag = 3


class TestChoices:
    @pytest.mark.parametrize(("layer", "mode"), [({}, "sync"), ({"actors": 1}, "sync"), ({"mode": "single"}, "single"), ({"actors": 2}, "sync"), ({"actors": 2, "mode": "async"}, "async"), ({"mode": "async"}, "async")])  # fmt: skip
    def test_modes(self, layer, mode):
        assert made(**layer).mode == mode

    @pytest.mark.parametrize(("layer", "ahead"), [({}, 1), ({"mode": "sync", "actors": 3}, 1), ({"flow.ahead": 0}, 0), ({"flow.ahead": 1}, 1), ({"mode": "single"}, 0), ({"mode": "async"}, 0), ({"mode": "single", "flow.ahead": 0}, 0)])  # fmt: skip
    def test_rounds_ahead(self, layer, ahead):
        assert made(**layer).flow.ahead == ahead

    @pytest.mark.parametrize(("layer", "steps", "episodes"), [({}, DEFAULT_STEPS, None), ({"steps": 5}, 5, None), ({"episodes": 5}, None, 5), ({"steps": 1, "episodes": 2}, 1, 2)])  # fmt: skip
    def test_lengths(self, layer, steps, episodes):
        config = made(**layer)
        assert (config.steps, config.episodes) == (steps, episodes)

    @pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:17"])
    def test_devices(self, device):
        assert made(device=device).device == device


class TestWrittenDown:
    LAYERS = (
        {},
        {"algo": "dqn", "prioritized": True, "hidden": [8, 9], "episodes": 3},
        {"mode": "async", "actors": 3, "target_return": -1.5, "flow.window_s": 0.1, "normalize_obs": True},
        {"environment.kwargs": {"gravity": 9.81, "names": ["a", "b"], "deep": {"x": 1}}, "environment.time_limit": 5},
        {"run_dir": "/tmp/some/where", "name": "here", "seed": 2**62},
        {"mode": "single"},
        {"flow.ahead": 0},
    )

    @pytest.mark.parametrize("layer", LAYERS)
    def test_it_comes_back_from_json(self, layer):
        config = made(**layer)
        assert unflatten(json.loads(json.dumps(flatten(config)))) == config

    @pytest.mark.parametrize("mode", ["single", "sync", "async"])
    def test_a_record_from_before_runs_could_be_ahead(self, mode):
        flat = flatten(made(mode=mode))
        del flat["flow.ahead"]
        assert unflatten(flat).flow.ahead == 0

    @given(st.floats(1e-12, 10.0), st.floats(0.0, 1.0), st.integers(0, 2**63 - 1))
    @settings(max_examples=50, deadline=None)
    def test_numbers_come_back_exactly(self, rate, gamma, seed):
        config = made(learning_rate=rate, gamma=gamma, seed=seed)
        again = unflatten(json.loads(json.dumps(flatten(config))))
        assert (again.agent.learning_rate, again.agent.gamma, again.seed) == (rate, gamma, seed)

    def test_flat_keys_are_those_one_may_give(self):
        flat = flatten(made())
        assert {key.split(".")[0] for key in flat if "." in key} == {*SECTIONS, "agent"}
        resolve_config(("again", {key: value for key, value in flat.items() if value is not None}))


class TestReading:
    def test_toml(self, tmp_path):
        path = tmp_path / "run.toml"
        path.write_text(
            'env = "CartPole-v1"\nseed = 4\n[agent]\nlearning_rate = 1e-3\nhidden = [8, 8]\n'
            "[flow]\nmax_lag = 2\n[environment]\nkwargs = {gravity = 9.0}\n"
        )
        flat = from_toml(path)
        assert flat == {
            "env": "CartPole-v1",
            "seed": 4,
            "agent.learning_rate": 1e-3,
            "agent.hidden": [8, 8],
            "flow.max_lag": 2,
            "environment.kwargs": {"gravity": 9.0},
        }
        assert resolve_config(("file", flat)).config.agent.hidden == (8, 8)

    def test_toml_that_is_none(self, tmp_path):
        path = tmp_path / "bad.toml"
        with pytest.raises(ConfigError, match=r"cannot read .*bad\.toml: No such file"):
            from_toml(path)
        path.write_text("seed = = 4\n")
        with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML: .*line 1"):
            from_toml(path)

    def test_an_unknown_table_is_an_error(self, tmp_path):
        path = tmp_path / "bad.toml"
        path.write_text('env = "CartPole-v1"\n[flo]\nmax_lag = 2\n')
        with pytest.raises(ConfigError, match=r"unknown key 'flo' in .*bad\.toml\."):
            resolve_config((str(path), from_toml(path)))

    def test_the_environment(self):
        environ = {
            "STEPPE_SEED": "5",
            "STEPPE_AGENT__LEARNING_RATE": "1e-2",
            "STEPPE_FLOW__MAX_LAG": "3",
            "STEPPE_RUNS": "/elsewhere",
            "HOME": "/root",
        }
        assert from_environ(environ) == {"seed": 5, "agent.learning_rate": 0.01, "flow.max_lag": 3}

    @pytest.mark.parametrize(
        ("text", "value"),
        [("3", 3), ("3e-4", 3e-4), ("true", True), ("[64, 64]", [64, 64]), ("'quoted'", "quoted"), ("plain words", "plain words"), ("", ""), ("{a = 1}", {"a": 1}), ('{"a": [1, true]}', {"a": [1, True]}), ("{a", "{a"), ("CartPole-v1", "CartPole-v1")],
    )  # fmt: skip
    def test_values(self, text, value):
        assert parse_value(text) == value

    def test_pairs(self):
        assert from_pairs(["a=1", " b = x=y "]) == {"a": 1, "b": "x=y"}
        with pytest.raises(ConfigError, match="-s takes key=value, not 'a'"):
            from_pairs(["a"])
