"""Kill -9 of writers, the reader and the broker at random moments, with a ledger of every sequence number.

`KILLS=100` makes it a hundred of each: `make chaos`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from steppe.core.contracts.errors import Unreachable
from steppe.transport.kafka.client import (
    KafkaConnection,
    decode_headers,
    ensure_topics,
    find_newest,
    get_watermarks,
    import_kafka,
    read_range,
)
from tests.chaos.kafka_parts import ACTORS, begin
from tests.support.debian import from_debian
from tests.support.kafka import PATIENCE_S, connected, own_broker, settings, wait_until

KILLS = int(os.environ.get("KILLS", "1"))  # of each kind
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600 + 60 * KILLS)]
AWAY_S = 20.0
PARTS = Path(__file__).with_name("kafka_parts.py")


class WritersAndReader:
    """Two writers and a reader in progress, each restarted when it is killed."""

    def __init__(self, connection, room, **environ):
        self.connection, self.room, self.words = connection, room, begin(connection, room)
        self.environ = {**os.environ, **environ}
        self.processes = {}
        for name in ("reader", *(f"writer-{actor}" for actor in range(ACTORS))):
            self.start(name)

    def start(self, name):
        kind, _, actor = name.partition("-")
        more = [] if kind == "reader" else [actor]
        command = [sys.executable, PARTS, "read" if kind == "reader" else "write", json.dumps(self.words), *more]
        with (self.room / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environ)

    def kill(self, name):
        process = self.processes[name]
        assert process.poll() is None, self.log(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.start(name)

    def log(self, name):
        return f"{name}: {(self.room / f'{name}.log').read_text()[-2000:]}"

    def learned(self):
        path = self.room / "learned.json"
        return json.loads(path.read_text()) if path.exists() else {"learned": []}

    def finish(self):
        (self.room / "finish").touch()
        for name, process in self.processes.items():
            assert process.wait(PATIENCE_S) == 0, self.log(name)

    def revive(self, words):
        """Restart the processes that ended with this message."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                assert words in self.log(name)
                self.start(name)

    def require_alive(self):
        for name, process in self.processes.items():
            assert process.poll() is None, self.log(name)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def account(self):
        """Every sent segment was learned from once, in its actor's order; the offsets agree."""
        told = self.learned()
        for actor in range(ACTORS):
            sent = json.loads((self.room / f"sent-{actor}.json").read_text())
            assert [n for one, n in told["learned"] if one == actor] == list(range(sent)), f"actor {actor}"
            assert sent > 0
        assert len(told["learned"]) > 20
        assert "missing" not in told["dropped"], told["dropped"]
        topic = self.connection.topic("experiences")
        group = self.connection.consumer(f"steppe-{self.connection.run}")
        places = [import_kafka().TopicPartition(topic, number) for number, _, _ in told["marks"]]
        committed = {place.partition: place.offset for place in group.committed(places, timeout=60)}
        assert all(low == get_watermarks(group, topic, number)[1] for number, low, _ in told["marks"])
        for number, low, _ in told["marks"]:  # after the last transaction there is nothing to learn from
            behind = read_range(group, topic, number, committed[number], low) if committed[number] < low else []
            assert {decode_headers(message)["kind"] for message in behind} <= {b"begin"}
        group.close()
        wait_until(lambda: self.published() == told["version"] - 1, "the last version")

    def published(self):
        last, _ = find_newest(self.connection, self.connection.topic("model_updates"), 0, lambda message: True)
        return int.from_bytes(decode_headers(last).get("version", b""), "little")


@pytest.fixture
def troupe(kafka, tmp_path):
    troupe = WritersAndReader(connected(kafka), tmp_path)
    yield troupe
    troupe.close()


def some_time(stream, troupe):
    """Wait until all have started and more segments were learned from, and a moment longer."""
    wait_until(lambda: {actor for actor, _ in troupe.learned()["learned"]} == set(range(ACTORS)), troupe.log("reader"))
    due = len(troupe.learned()["learned"]) + stream.randrange(1, 40)
    wait_until(lambda: len(troupe.learned()["learned"]) >= due, troupe.log("reader"))
    time.sleep(stream.uniform(0, 0.05))


@pytest.mark.long
@pytest.mark.parametrize("victims", [["writer-0", "writer-1"], ["reader"]], ids=["writers", "reader"])
def test_no_segment_is_lost_when_writers_and_reader_are_killed_repeatedly(victims, troupe):
    stream = random.Random(str(victims))
    for _ in range(KILLS):
        some_time(stream, troupe)
        troupe.kill(stream.choice(victims))
    some_time(stream, troupe)
    troupe.finish()
    troupe.account()


@pytest.fixture
def broker(kafka, tmp_path):
    """A broker for this test; its acknowledged messages are there after a restart."""
    broker = own_broker(tmp_path / "broker")
    yield broker
    broker.down()


@contextmanager
def writers_and_reader(broker, room):
    connection = KafkaConnection(settings(broker.up(0).address), "chaos~1")
    ensure_topics(connection)
    with accounted(WritersAndReader(connection, room)) as troupe:
        yield troupe


@contextmanager
def accounted(troupe):
    try:
        yield troupe
        some_time(random.Random(2), troupe)
        troupe.finish()
        troupe.account()
    finally:
        troupe.close()


@pytest.mark.long
def test_no_segment_is_lost_when_the_broker_is_killed_repeatedly(broker, tmp_path):
    """Writers wait with a bounded number of segments, then all continue. Processes started meanwhile report that no
    broker answers.
    """
    with writers_and_reader(broker, tmp_path) as troupe:
        stream = random.Random(5)
        for _ in range(KILLS):
            some_time(stream, troupe)
            broker.kill()
            broker.up(0)
        some_time(stream, troupe)
        broker.down()
        with pytest.raises(Unreachable, match="no Kafka broker answers"):
            troupe.connection.fetch_metadata(1.0)
        sizes = {name: _size(process.pid) for name, process in troupe.processes.items()}
        time.sleep(AWAY_S)  # there is no other condition to wait for
        troupe.require_alive()
        for name, process in troupe.processes.items():
            assert _size(process.pid) < sizes[name] + (64 << 20), f"{name} grew while nobody took its messages"
        broker.up(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_no_segment_is_lost_when_the_brokers_disk_is_full(broker, tmp_path):
    """It ends with a message that says why; all others wait, or report which topic could not be written, and continue
    when there is space and it has been restarted.
    """
    data = broker.home / "data"
    data.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", data], check=True)
    try:
        with writers_and_reader(broker, tmp_path) as troupe:
            some_time(random.Random(1), troupe)
            filler = data / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass
            wait_until(lambda: broker.running() is None, "the broker's end")
            assert "No space left on device" in broker.describe_last_error()
            filler.unlink()
            broker.up(0)
            troupe.revive("a message could not be written to")
    finally:
        broker.down()
        subprocess.run(["umount", "--lazy", data], check=True)


def faketime():
    """Return the library that changes the time of a program."""
    return next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)


def test_no_segment_is_lost_when_clocks_jump(kafka, tmp_path):
    """The clocks of the writers and the reader jump by hours, forwards and back; no message is handled by its time."""
    clock = tmp_path / "clock"
    clock.write_text("+0")
    environ = {
        "LD_PRELOAD": str(from_debian("libfaketime", faketime)),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
    }
    with accounted(WritersAndReader(connected(kafka), tmp_path, **environ, FAKETIME_DONT_FAKE_MONOTONIC="1")) as troupe:
        for jump in ("+3h", "-40d", "+0"):
            some_time(random.Random(jump), troupe)
            clock.write_text(jump)
        some_time(random.Random(1), troupe)
        troupe.kill("writer-0")
        troupe.kill("reader")


def _size(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
