"""The development broker: jars with verified checksums, a process that is found again, messages for what is missing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from steppe.core.contracts.errors import DamagedFile, UsageError
from steppe.transport.kafka import dev_broker
from steppe.transport.kafka.dev_broker import DevBroker, fetch_jars, find_jar_differences, find_java, read_jar_lock
from tests.support.kafka import own_broker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
STEPPE = Path(sys.executable).with_name("steppe")


@pytest.mark.slow
def test_up_status_and_down(kafka, tmp_path, monkeypatch):
    """With the session's jars, in a separate home directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / DevBroker.default().jars.name).symlink_to(DevBroker.default().jars)
    environ = {**os.environ, "STEPPE_KAFKA_HOME": str(tmp_path / "home")}

    def say(*words):
        return subprocess.run(
            [STEPPE, "kafka", *words, "--json"], capture_output=True, text=True, timeout=300, check=False, env=environ
        )  # fmt: skip

    assert (say("status").returncode, json.loads(say("status").stdout)["running"]) == (3, False)
    try:
        first = json.loads(say("up", "--port", "0").stdout)
        again = json.loads(say("up").stdout)
        assert first == again
        assert first["running"]
        assert json.loads(say("status").stdout)["address"] == first["address"]
        assert json.loads(say("down").stdout) == {"stopped": True}
        assert not json.loads(say("status").stdout)["running"]
        host, _, port = first["address"].rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=60).close()
        assert json.loads(say("down").stdout) == {"stopped": False}
    finally:
        say("down")


def test_a_used_port_is_reported_in_one_sentence(kafka, tmp_path):
    with pytest.raises(UsageError, match=r"port \d+ of 127.0.0.1 is not available"):
        own_broker(tmp_path).up(int(kafka.rpartition(":")[2]))


def test_missing_java_is_reported_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(UsageError, match="needs Java 17 or newer, and there is no java here"):
        find_java()
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    with pytest.raises(UsageError, match=r"needs Java 17 or newer, but .*11\.0\.2"):
        find_java()


def test_a_broker_can_be_stopped_if_a_signal_comes_while_it_is_spawned(tmp_path, monkeypatch):
    """SIGTERM right after the process exists: the caller's `finally` still finds it."""
    java = tmp_path / "java"
    java.write_text(
        '#!/bin/sh\ncase "$*" in -version) echo \'openjdk version "21"\' >&2;; *StorageTool*) ;; *) exec sleep 600;; esac\n'
    )
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    pids, write = [], dev_broker.write_atomic

    def write_after_signal(path, data):
        if path.name == "broker.json":
            pids.append(json.loads(data)["pid"])
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        write(path, data)

    monkeypatch.setattr(dev_broker, "write_atomic", write_after_signal)
    broker = DevBroker(tmp_path / "home", tmp_path)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    try:
        with pytest.raises(SystemExit):
            broker.up(0)
        status = Path(f"/proc/{pids[0]}/status").read_text()
    finally:
        signal.signal(signal.SIGTERM, before)
        stopped = broker.down()
        if not stopped:
            os.kill(pids[0], signal.SIGKILL)
    assert stopped
    assert int(status.partition("SigBlk:")[2].split()[0], 16) & 1 << signal.SIGTERM - 1 == 0, (
        "the broker can be stopped"
    )


def test_jars_match_the_lock_file(kafka, tmp_path, monkeypatch):
    jars = DevBroker.default().jars
    assert find_jar_differences(jars, read_jar_lock()) == []
    assert any(name.startswith("kafka_2.13-") for name in read_jar_lock())
    copy = tmp_path / "jars"
    copy.mkdir()
    for path in jars.glob("*.jar"):
        (copy / path.name).symlink_to(path)
    first, second, *_ = sorted(copy.glob("*.jar"))
    first.unlink()
    first.write_bytes(b"another")
    second.unlink()
    (copy / "stranger.jar").touch()
    words = find_jar_differences(copy, read_jar_lock())
    assert words == [
        f"{second.name} is missing", "stranger.jar does not belong there", f"{first.name} has another sha256",
    ]  # fmt: skip
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="there is no mvn here"):
        fetch_jars(copy)


def test_jars_from_maven_are_verified(tmp_path, monkeypatch):
    """With a Maven that delivers something else."""
    maven = tmp_path / "bin" / "mvn"
    maven.parent.mkdir()
    maven.write_text(
        "#!/bin/sh\nfor word; do case $word in -DoutputDirectory=*) into=${word#*=};; esac; done\nmkdir $into\n: > $into/kafka.jar\n"
    )
    maven.chmod(0o755)
    monkeypatch.setenv("PATH", f"{maven.parent}:/bin:/usr/bin")
    with pytest.raises(DamagedFile, match=r"not those of kafka-jars\.lock"):
        fetch_jars(tmp_path / "jars")
    assert not (tmp_path / "jars").exists()
    maven.write_text("#!/bin/sh\necho '[ERROR] no way to the repository'; exit 1\n")
    with pytest.raises(UsageError, match="no way to the repository"):
        fetch_jars(tmp_path / "jars")
    assert dev_broker.COORDINATES


def test_the_last_log_lines_of_a_dead_broker_are_shown(tmp_path):
    broker = DevBroker(tmp_path, tmp_path)
    assert broker.describe_crash() == ""
    (tmp_path / "broker.json").write_text('{"pid": 999999999, "started": 1, "address": "127.0.0.1:1"}')
    lines = [
        "java.io.IOException: No space left on device",
        "\tat java.base/Write",
        "[main] ERROR kafka - all log dirs failed",
    ]
    (tmp_path / "broker.log").write_text("\n".join(lines))
    assert "the last one was not stopped" in broker.describe_crash()
    assert broker.describe_crash().endswith("java.io.IOException: No space left on device)")
    assert not broker.down()
