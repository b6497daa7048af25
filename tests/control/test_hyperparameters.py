"""Validation of hyperparameters by the service, which REST, the page and MCP share."""

from __future__ import annotations

import pytest

from steppe.control import models
from steppe.control.factory import make_local_service
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError, Conflict
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.records.run_directory import RunDirectory
from steppe.replay import factory
from steppe.training.train import run_experiment
from tests.support.tuning import settings

pytestmark = pytest.mark.integration


@pytest.fixture
def service():
    created = make_local_service()
    yield created
    created.close()


def request(algo="ppo", **more):
    return models.RunRequest(env="CartPole-v1", algo=algo, start=False, **more)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"clip": 1e308}, "less than or equal to 10"),
        ({"hidden": [1_000_000_000]}, "less than or equal to 65536"),
        ({"hidden": [65_536, 65_536]}, r"needs about .* GiB of memory"),
    ],
)
def test_a_request_with_impossible_values_creates_no_run(service, monkeypatch, agent, message):
    monkeypatch.setattr(factory, "available_bytes", lambda: 8 * 2**30)
    with pytest.raises(ConfigError, match=message):
        service.create_run(request(agent=agent), "test")
    assert service.list_runs().runs == []


def test_a_change_that_needs_too_much_memory_is_refused(service, monkeypatch):
    run = service.create_run(request("dqn"), "test").id
    monkeypatch.setattr(factory, "available_bytes", lambda: 2**29)
    with pytest.raises(ConfigError, match="a batch"):
        service.set_hyperparameters(run, {"batch_size": 1_000_000, "double": False}, "test")
    with pytest.raises(ConfigError, match="less than or equal to"):
        service.set_hyperparameters(run, {"learning_rate": 1e308}, "test")


@pytest.mark.regression
def test_a_value_that_the_environment_does_not_support_is_refused_for_a_stopped_run(service):
    """A run that has started knows its environment: CartPole has no continuous actions with bounds."""
    layer = {**settings("ppo"), "name": "begun", "steps": 64}
    run_experiment(resolve_config(("call", layer)), observers=[lambda view: view.updates > 0])
    directory = RunDirectory.open("begun")
    directory.store.set_status("STOPPED")
    with pytest.raises(ConfigError, match="bounds_coef is for continuous actions, and CartPole-v1 has others"):
        service.set_hyperparameters("begun", {"bounds_coef": 0.5}, "test")
    assert directory.store.read(COMMANDS) == []
    assert service.set_hyperparameters("begun", {"gamma": 0.5}, "test").operation is not None


@pytest.mark.regression
def test_what_only_the_environment_can_tell_is_refused_before_a_run_has_begun(service):
    """It would be acknowledged, and the run would fail when it is started."""
    run = service.create_run(request(), "test").id
    with pytest.raises(Conflict, match=r"bounds_coef: only some environments support it, and .* has not started yet"):
        service.set_hyperparameters(run, {"bounds_coef": 0.5}, "test")
    assert RunDirectory(service.root / run).store.read(COMMANDS) == []
    assert service.set_hyperparameters(run, {"bounds_coef": 0.0, "gamma": 0.5}, "test").operation is not None


def test_workers_change_some_hyperparameters_only_on_restart(service):
    run = service.create_run(request(mode="workers", actors=2), "test").id
    effects = {one.name: one.effect for one in service.get_hyperparameters(run).hyperparameters}
    assert (effects["entropy_coef"], effects["clip"], effects["hidden"]) == ("live", "restart", "fixed")


def test_a_change_that_the_run_refused_is_not_applied_on_resume(service):
    run = service.create_run(request(), "test").id
    for gamma, obeyed in ((0.5, True), (0.25, False)):
        done = service.set_hyperparameters(run, {"gamma": gamma}, "test").operation
        details = {"id": done.id, "command": "set", "obeyed": obeyed, "live": ["gamma"]}
        store = RunDirectory(service.root / run).store
        store.post(EVENTS, EventReport(run=run, kind="command", role="learner", details=details).record())
    assert len(store.read(COMMANDS)) == 2
    values = {one.name: one.value for one in service.get_hyperparameters(run).hyperparameters}
    assert values["gamma"] == 0.5
