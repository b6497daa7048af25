"""The service without HTTP: hung runs are killed, long reads block no other run, memory stays bounded."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from steppe.control import models, process_host, run_cache
from steppe.control.curves import Curves
from steppe.control.factory import make_local_service
from steppe.control.http.stream import Hub, RunWatcher
from steppe.control.run_requests import Bounds
from steppe.control.service import Service
from steppe.core.config.run import KafkaConfig, RunConfig
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.transport import TRAINING
from steppe.records.run_directory import RunDirectory
from steppe.records.view import ENDED
from tests.support.service import SHORT, TABLE, clean_up, until


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "runs"))
    created = make_local_service(Bounds(stop_s=1.0))
    yield created
    for found in created.list_runs().runs:
        process_host.kill_run_processes(RunDirectory(created.root / found.id).store.status())
        until(lambda run=found.id: created.get_run(run).state in (*ENDED, "PENDING"), "the run has ended")
        created.reconcile()
    created.close()
    clean_up(created.root)


def request(**changes: object) -> models.RunRequest:
    return models.RunRequest.model_validate({**SHORT, "start": False, **changes})


@pytest.mark.slow
@pytest.mark.integration
def test_a_run_that_does_not_stop_is_killed(service: Service) -> None:
    run = service.create_run(models.RunRequest.model_validate(TABLE), "test").id
    until(lambda: service.get_run(run).state == "RUNNING", "the run is running")
    store = RunDirectory(service.root / run).store
    os.kill(store.status().pid or 0, signal.SIGSTOP)  # alive, but not responding
    operation = service.stop_run(run, "test")
    assert operation.state == "pending"

    def finished_operation() -> models.Operation | None:
        service.reconcile()
        found = service.get_operation(operation.id)
        return found if found.state != "pending" else None

    done = until(finished_operation, "the run has been stopped or killed")
    assert (done.state, done.message) == ("succeeded", "the run did not stop in time and was killed")
    found = service.get_run(run)
    assert (found.state, found.reason) == ("STOPPED", "killed")
    assert not any(one["message"] is None for one in service.database.operations(run) if one["kind"] == "stop")


@pytest.mark.unit
def test_a_long_read_of_a_run_does_not_block_other_runs(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = service.create_run(request(), "test").id, service.create_run(request(), "test").id
    reading, release = threading.Event(), threading.Event()
    refresh = Curves.refresh

    def slow_refresh(self: Curves) -> None:
        reading.set()
        assert release.wait(60)
        refresh(self)

    monkeypatch.setattr(Curves, "refresh", slow_refresh)
    reader = threading.Thread(target=service.get_metrics, args=(slow,))
    reader.start()
    assert reading.wait(60)
    assert service.get_actors(other).desired == 1
    assert {found.id for found in service.list_runs().runs} == {slow, other}
    assert service.get_run(slow).state == "PENDING"
    assert service.stop_run(slow, "test").state == "succeeded", "changes are not blocked either"
    release.set()
    reader.join(60)
    assert not reader.is_alive()


@pytest.mark.unit
def test_runs_use_the_brokers_if_possible_and_credentials_are_not_returned(service: Service) -> None:
    service.backend.kafka = KafkaConfig(address="127.0.0.1:9", prefix="mine.", security="sasl", username="me")
    for changes, runtime in (
        ({}, "kafka"),
        ({"runtime": "kafka"}, "kafka"),
        ({"runtime": "processes"}, "processes"),
        ({"algo": "a3c", "mode": "workers"}, "processes"),  # workers share memory
    ):
        created = service.create_run(request(**changes), "test")
        config = RunDirectory(service.root / created.id).config()
        assert (created.config["runtime"], config.runtime) == (runtime, runtime), changes
        assert config.kafka == (service.backend.kafka if runtime == "kafka" else KafkaConfig())
        assert "kafka.username" not in created.config
    service.backend.kafka = None
    with pytest.raises(ConfigError, match="--kafka HOST:PORT"):
        service.create_run(request(runtime="kafka"), "test")


@pytest.mark.unit
def test_entries_of_ended_runs_are_read_again_when_they_change(service: Service) -> None:
    run = service.create_run(request(), "test").id
    assert [found.state for found in service.list_runs().runs] == ["PENDING"]
    service.stop_run(run, "test")
    assert [found.state for found in service.list_runs().runs] == ["STOPPED"]
    RunDirectory(service.root / run).store.set_status("FAILED", "error", "written by another process")
    assert [found.reason for found in service.list_runs().runs] == ["error"]
    service.delete_run(run, "test")
    assert service.list_runs().runs == []


@pytest.mark.unit
def test_a_connected_client_causes_no_reading_of_old_curves(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    run = service.create_run(request(), "test").id
    service.stop_run(run, "test")
    read: list[Curves] = []
    monkeypatch.setattr(Curves, "refresh", lambda curves: read.append(curves))
    hub = Hub()
    hub.clients = 1
    watcher, store = RunWatcher(service, hub), RunDirectory(service.root / run).store
    watcher.poll()
    assert (hub.number, read) == (1, []), "the run is listed, and no history is read"
    store.set_status("RUNNING")
    try:
        watcher.poll()
        assert len(read) == 1
    finally:
        store.set_status("SUCCEEDED")  # the run belongs to this process, which must not be killed
    watcher.poll()
    assert len(read) == 2, "its last points are sent"


SERIES, REPORTS = 100, 1_500
DAY_OVER_TEST = 86_400 * 1_000 / (SERIES * REPORTS)  # factor by which all limits are reduced


@pytest.mark.slow
@pytest.mark.unit
def test_memory_is_bounded_over_a_day_of_points(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Simulate a day with 1,000 points per second: fewer points, and limits that are smaller by the same factor."""
    monkeypatch.setattr(run_cache, "Curves", functools.partial(Curves, most_points=int(20_000 / DAY_OVER_TEST)))
    config = RunConfig(env="CartPole-v1", run_dir=service.root / "day")
    directory = RunDirectory.create(config, {})
    directory.store.set_status("RUNNING")
    hub = Hub(size=64, size_bytes=1 << 16)
    hub.clients = 1
    watcher = RunWatcher(service, hub)

    def simulate(begin: int, end: int) -> int:
        """Return the peak memory at ten moments; it rises and falls as curves are downsampled."""
        most = 0
        for step in range(begin, end):
            stats = {f"s{number}": (step * number) % 7.0 for number in range(SERIES)}
            report = TrainingReport(run="day", version=step, updates=step, env_steps=step, train_s=step, stats=stats)
            directory.store.post(TRAINING, report.record())
            if step % 10 == 0:
                watcher.poll()
            if step % (REPORTS // 30) == 0:
                gc.collect()
                most = max(most, tracemalloc.get_traced_memory()[0])
        return most

    tracemalloc.start()
    try:
        simulate(1, REPORTS // 3)  # warm up: caches, buffers and the series themselves
        before = simulate(REPORTS // 3, 2 * REPORTS // 3)
        after = simulate(2 * REPORTS // 3, REPORTS)
    finally:
        tracemalloc.stop()
        directory.store.set_status("SUCCEEDED")  # the run belongs to this process, which must not be killed
        directory.release()
    assert watcher.failures == 0
    assert service.get_metrics("day", ["loss/s1"]).series[0].total <= 20_000 / DAY_OVER_TEST
    kept = (after - before) / (SERIES * REPORTS / 3)
    assert kept < 2.0, f"{kept:.1f} bytes a point: {before:,} after two thirds of the day, {after:,} at its end"
