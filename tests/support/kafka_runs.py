"""Runs over Kafka from the command line, whole and as roles that come alone, for tests of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from steppe.core.contracts.transport import COMMANDS, EVENTS, TRAINING
from steppe.runtimes.kafka.manifest import find_manifest
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import KafkaConnection
from tests.support.commands import opened
from tests.support.kafka import settings

STEPPE = Path(sys.executable).with_name("steppe")
SMALL = {"steps": 1500, "envs": 4, "hidden": (16, 16), "evaluation.episodes": 5, "evaluation.every_steps": 400}
PPO = {"algo": "ppo", "env": "CartPole-v1", "segment_steps": 32, "minibatch_size": 64, "epochs": 2}


def on(kafka, **more):
    found = settings(kafka)
    return {"runtime": "kafka", "kafka.address": kafka, "kafka.prefix": found.prefix, "kafka.partitions": 2, **more}


def words(kafka, agent=None, **more):
    """Of `steppe train`, and the same as settings."""
    usual = {"mode": "sync", "actors": 2, "seed": 7, "checkpoint.every_s": 0.2}
    given = on(kafka, **{**SMALL, **(agent or PPO), **usual, **more})
    pairs = {key: value for key, value in given.items() if key not in ("env", "runtime", "kafka.address")}
    named = [f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in pairs.items()]
    sets = [word for pair in named for word in ("-s", pair)]
    return [given["env"], "--runtime", "kafka", "--kafka", kafka, "--name", "run", *sets], given


def alone(kind, kafka, prefix, *more):
    return [STEPPE, "role", kind, *more, "--kafka", kafka, "--run", "run", "-s", f"kafka.prefix={prefix}"]


def described(given):
    """What a learner that comes alone is told of a run that does not exist yet."""
    pairs = {key: value for key, value in given.items() if key not in ("env", "kafka.address")}
    named = [f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in pairs.items()]
    return [word for pair in named for word in ("-s", pair)]


def connection_to(kafka, prefix):
    """As the run's processes have it; None while it does not exist."""
    config = settings(kafka).model_copy(update={"prefix": prefix})
    if prefix + COMMANDS not in KafkaConnection(config, "run").fetch_metadata().topics:
        return None
    manifest = find_manifest(config, "run")
    return None if manifest is None else KafkaConnection(config, manifest.run)


def told(connection, topic):
    """All of a run's records on Kafka."""
    board = KafkaBoard(connection)
    try:
        return [record for _, record in board.read(topic)]
    finally:
        board.close()


def reports(kafka, prefix):
    """What a run's learner said, as soon as there is one."""
    connection = connection_to(kafka, prefix)
    return [] if connection is None else told(connection, TRAINING)


def answers(events=None):
    """What became of each command, as the run's event log says."""
    found = [event for _, event in opened().store.read(EVENTS)] if events is None else events
    return [event["details"] | {"role": event["role"]} for event in found if event["kind"] == "command"]
