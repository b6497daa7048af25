"""Random messages on every topic during training: the run ends with the right weights, and the service answers
throughout.

`FUZZ=1000000` posts a million records: `make fuzz`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from steppe.core.config.run import KafkaConfig, resolve_config
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.core.io.atomic_files import read_json
from steppe.records.run_directory import RunDirectory
from steppe.records.view import ENDED
from steppe.runtimes.kafka.manifest import wire_name
from steppe.training.train import run_experiment
from steppe.transport.kafka.client import KafkaConnection, decode_headers, get_watermarks, open_consumer
from tests.support.kafka import dead_letters
from tests.support.kafka_garbage import EVERY, Maker
from tests.support.service import Served, make, run_of, stop_service_and_runs

MANY = int(os.environ.get("FUZZ", "10000"))
pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800 + MANY // 100)]
PARTS = ("", "/actors", "/learner", "/metrics", "/events", "/evaluations", "/diagnosis", "/hyperparameters")
RUN = {
    "env": "CartPole-v1", "mode": "sync", "actors": 2, "envs": 4, "seed": 7,
    "agent": {"hidden": [16], "segment_steps": 32, "minibatch_size": 64, "epochs": 1},
    "evaluation": {"episodes": 2, "every_steps": 5_000},
}  # fmt: skip


@pytest.fixture
def served(kafka, tmp_path):
    service = Served(tmp_path, str(kafka))
    service.start()
    yield service
    stop_service_and_runs(service)


@contextmanager
def repeated_requests(served, run):
    """Request everything about a run repeatedly; every response is valid."""
    ended, wrong, rounds = threading.Event(), [], []

    def ask():
        with served.client() as api:
            while not ended.wait(0.05):
                rounds.append(1)
                for path in ("/healthz", "/api/v1/runs", *(f"/api/v1/runs/{run}{part}" for part in PARTS)):
                    answer = api.get(path)
                    if answer.status_code != 200:
                        wrong.append((path, answer.status_code, answer.text[:300]))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield wrong
    finally:
        ended.set()
        thread.join()
    assert rounds


def trained_inline(tmp_path, steps):
    flat = {key: value for key, value in RUN.items() if not isinstance(value, dict)}
    flat |= {f"{part}.{key}": value for part in ("agent", "evaluation") for key, value in RUN[part].items()}
    given = {**flat, "steps": steps, "runtime": "inline", "run_dir": tmp_path / "inline"}
    return run_experiment(resolve_config(("call", given))).summary["weights_sha256"]


def flood(connection, count, seed):
    """Post this many records; return how many went to each topic."""
    maker, producer, posted = Maker(connection, seed), connection.producer(), Counter()
    while sum(posted.values()) < count:
        record = maker.make()
        try:
            producer.produce(
                connection.topic(record.topic), record.value, record.key, record.partition, headers=record.headers
            )
            posted[record.topic] += 1
        except BufferError:
            producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(600) == 0
    return posted


@pytest.mark.slow
@pytest.mark.parametrize("count", [MANY])
@pytest.mark.long
def test_random_messages_on_every_topic_change_nothing(served, tmp_path, count):
    steps = 12_000 + count // 4
    with served.client() as api:
        run = make(api, RUN, steps=steps)
        path = f"/api/v1/runs/{run}"
        awaited(lambda: run_of(api, run)["progress"]["updates"] > 0, "the run learns")
        directory = RunDirectory(served.root / "runs" / run)
        config = KafkaConfig(address=served.options[1], prefix=served.environ["STEPPE_KAFKA__PREFIX"], partitions=2)
        connection = KafkaConnection(config, wire_name(directory))
        with repeated_requests(served, run) as wrong:
            # Also while it is paused, so that on any machine much of it arrives before most of the training.
            for word, state in (("pause", "PAUSED"), ("resume", "RUNNING")):
                assert api.post(f"{path}/{word}").status_code == 202
                awaited(lambda state=state: run_of(api, run)["state"] in (state, *ENDED), f"the run is {state}")
                assert set(flood(connection, count // 2, word)) == set(EVERY)
            awaited(lambda: run_of(api, run)["state"] in ENDED, "the run has ended")
            assert run_of(api, run)["state"] == "SUCCEEDED", run_of(api, run)
        assert wrong == []
        heard = served.root / "runs" / ".control" / "heard.json"
        with open_consumer(connection) as consumer:
            end = get_watermarks(consumer, connection.topic(COMMANDS))[1]
        awaited(lambda: read_json(heard)[connection.topic(COMMANDS)] >= end, "the service has passed over all of it")
    parked = dead_letters(connection)
    assert max(len(message.value() or b"") for message in parked) <= 4096
    assert {decode_headers(message)["topic"].decode() for message in parked} == set(EVERY)
    told = Counter()
    for _, event in directory.store.read(EVENTS, limit=1 << 40):
        told.update(event["details"].get("refused", {}) if event["kind"] == "warning" else {})
    assert set(told) == set(EVERY), "what was refused is counted in the run's event log"
    assert read_json(directory.path / "summary.json")["weights_sha256"] == trained_inline(tmp_path, steps)


def awaited(holds, what):
    """Wait for something that can take long on a busy machine."""
    deadline = time.monotonic() + 500 + MANY // 300
    while not holds():
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.1)
