"""A Kafka broker on this machine, for development and tests: jars by their Maven coordinates, checked, in a directory of
their own; one Java process in KRaft mode on loopback.

    $STEPPE_KAFKA_HOME, or ~/.cache/steppe/kafka
      jars-VERSION/     what kafka-jars.lock lists, each with its sha256
      broker/           server.properties, data/, broker.log, broker.json with the process's id
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from steppe.core.contracts.errors import DamagedFile, Unreachable, UsageError
from steppe.core.io.atomic_files import write_atomic

VERSION = "4.1.0"
COORDINATES = (f"org.apache.kafka:kafka_2.13:{VERSION}", "org.slf4j:slf4j-simple:1.7.36")
LOCK = Path(__file__).with_name("kafka-jars.lock")
MIN_JAVA = 17
START_S, STOP_S, FETCH_S = 180.0, 15.0, 600.0
HEAP_MB = 256


class BrokerProcess(msgspec.Struct, frozen=True):
    """The process of a broker, as broker.json names it."""

    pid: int
    started: int  # in the kernel's ticks: a pid alone may have become another's
    address: str


@dataclass(frozen=True)
class DevBroker:
    """A broker whose files are all in `home`. Only one process may start or stop it at a time."""

    home: Path
    jars: Path
    heap_mb: int = HEAP_MB
    host: str = "127.0.0.1"  # the address that it listens on and is known by

    @classmethod
    def default(cls) -> DevBroker:
        """The one of `steppe kafka up`."""
        cache = cache_directory()
        return cls(cache / "broker", cache / f"jars-{VERSION}")

    def running(self) -> BrokerProcess | None:
        """The process, if it is there."""
        try:
            known = msgspec.json.decode((self.home / "broker.json").read_bytes(), type=BrokerProcess)
        except (OSError, msgspec.DecodeError):
            return None
        return known if _process_start_ticks(known.pid) == known.started else None

    def up(self, port: int = 9092) -> BrokerProcess:
        """Start it and wait until it answers; with port 0, on one that is free. Does nothing where it runs already."""
        if (known := self.running()) is not None:
            return known
        java = find_java()
        self.home.mkdir(parents=True, exist_ok=True)
        port = port or self._previous_port() or _free_port()
        _require_free(self.host, port)
        self._configure(port)
        if not (self.home / "data" / "meta.properties").exists():
            self._format(java)
        pid = self._start(java)
        running = BrokerProcess(pid, _process_start_ticks(pid) or 0, f"{self.host}:{port}")
        write_atomic(self.home / "broker.json", msgspec.json.encode(running))
        self._await(pid, port)
        return running

    def describe_crash(self) -> str:
        """In words, that it ended without being asked to; nothing where it did not."""
        if self.running() is not None or not (self.home / "broker.json").exists():
            return ""
        return f", and the last one was not stopped ({self.describe_last_error()})"

    def down(self, timeout_s: float = STOP_S) -> bool:
        """Stop it, by force after `timeout_s`; whether there was one."""
        known = self.running()
        if known is None:
            return False
        self._signal(known, signal.SIGTERM)
        until = time.monotonic() + timeout_s
        while self.running() is not None and time.monotonic() < until:
            time.sleep(0.05)
        self.kill()
        (self.home / "broker.json").unlink(missing_ok=True)
        return True

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if (known := self.running()) is not None:
            self._signal(known, signal.SIGKILL)
            while self.running() is not None:
                time.sleep(0.01)

    def _signal(self, known: BrokerProcess, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(known.pid, number)

    def _previous_port(self) -> int | None:
        """The port it had before: whoever knows its address finds it there again."""
        found = re.search(r"advertised.listeners=\w+://[\w.]+:(\d+)", self._text("server.properties"))
        return int(found[1]) if found else None

    def _text(self, name: str) -> str:
        try:
            return (self.home / name).read_text(errors="replace")
        except OSError:
            return ""

    def _configure(self, port: int) -> None:
        text = "".join(f"{name}={value}\n" for name, value in self.settings(port).items())
        write_atomic(self.home / "server.properties", text.encode())

    def settings(self, port: int) -> dict[str, object]:
        """Of server.properties."""
        controller = _free_port()
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": f"PLAINTEXT://{self.host}:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.host}:{port}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "broker.heartbeat.interval.ms": 500,
            "broker.session.timeout.ms": 2_000,  # as long, after a crash, the controller waits for who is dead
            "log.dirs": self.home / "data",
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 4,
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 2_000,
            "group.initial.rebalance.delay.ms": 0,
            "message.max.bytes": 64 << 20,
            "replica.fetch.max.bytes": 64 << 20,
            "log.cleaner.dedupe.buffer.size": 8 << 20,
            "num.network.threads": 2,
            "num.io.threads": 4,
            "socket.request.max.bytes": 128 << 20,
        }

    def format_arguments(self) -> list[str]:
        """What its storage is made with."""
        return ["format", "--cluster-id", _cluster_id(), "--config", str(self.home / "server.properties")]

    def _format(self, java: str) -> None:
        words = self.format_arguments()
        done = subprocess.run(
            [*self._java(java), "kafka.tools.StorageTool", *words], capture_output=True, text=True, timeout=START_S
        )
        if done.returncode:
            raise UsageError(f"the broker's storage in {self.home} cannot be made: {done.stderr.strip()[-400:]}")

    def _start(self, java: str) -> int:
        """Not by subprocess: the broker outlives this process, which need not look after it."""
        words = [*self._java(java), "kafka.Kafka", str(self.home / "server.properties")]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        nothing, log = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), str(self.home / "broker.log")
        actions = [nothing, (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)]
        return os.posix_spawn(java, words, os.environ, file_actions=actions, setsid=True)

    def _java(self, java: str) -> list[str]:
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        memory = [f"-Xmx{self.heap_mb}m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return [java, *memory, quiet, "-Djava.net.preferIPv4Stack=true", "-cp", f"{self.jars}/*"]

    def _await(self, pid: int, port: int) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if _process_start_ticks(pid) is None:
                raise Unreachable(f"the broker ended at once: {self.describe_last_error()}")
            with contextlib.suppress(OSError), socket.create_connection((self.host, port), 0.5):
                return
            time.sleep(0.05)
        self.kill()
        raise Unreachable(f"the broker did not answer within {START_S:g} s: {self.describe_last_error()}")

    def describe_last_error(self) -> str:
        """Where its output is, and of that the last line that says what went wrong."""
        lines = self._text("broker.log").splitlines()
        wrong = [line for line in lines if "Exception: " in line] or [line for line in lines if "ERROR" in line]
        return f"its output is in {self.home / 'broker.log'}: {wrong[-1].strip()[:300] if wrong else 'no errors'}"


def cache_directory() -> Path:
    """Where jars and the usual broker are kept."""
    given = os.environ.get("STEPPE_KAFKA_HOME")
    return (
        Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steppe" / "kafka"
    )


def find_java() -> str:
    """A Java that is new enough."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if java is None:
        raise UsageError(f"a Kafka broker needs Java {MIN_JAVA} or newer, and there is no java here: install it")
    told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=START_S, check=False).stderr
    found = re.search(r'version "(\d+)', told)
    if found is None or int(found[1]) < MIN_JAVA:
        version = told.splitlines()[0] if told else "unknown"
        raise UsageError(f"a Kafka broker needs Java {MIN_JAVA} or newer, but {java} says {version}")
    return java


def fetch_jars(into: Path) -> Path:
    """Have Maven bring the jars, from wherever the machine's Maven takes them, unless they are there and as they should be."""
    expected = read_jar_lock()
    if into.is_dir() and not find_jar_differences(into, expected):
        return into
    maven = shutil.which("mvn")
    if maven is None:
        raise UsageError(
            f"the broker's jars come with Maven, and there is no mvn here: install it, or put the libs of Kafka {VERSION} "
            f"into {into}"
        )
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        found = Path(scratch) / "jars"
        _run_maven(maven, Path(scratch), found)
        if wrong := find_jar_differences(found, expected):
            raise DamagedFile(f"the jars that Maven brought are not those of {LOCK.name}: {'; '.join(wrong[:3])}")
        shutil.rmtree(into, ignore_errors=True)
        os.replace(found, into)
    return into


def read_jar_lock() -> dict[str, str]:
    """Name of each jar → its sha256."""
    rows = [line.split() for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return {name: digest for digest, name in rows}


def find_jar_differences(jars: Path, expected: dict[str, str]) -> list[str]:
    """What is missing, superfluous or changed in a directory of jars, in words."""
    found = {path.name: path for path in jars.glob("*.jar")}
    words = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    words += [f"{name} does not belong there" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        if hashlib.sha256(found[name].read_bytes()).hexdigest() != expected[name]:
            words.append(f"{name} has another sha256")
    return words


def _run_maven(maven: str, scratch: Path, into: Path) -> None:
    (scratch / "pom.xml").write_text(_pom(COORDINATES))
    words = ["-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={into}"]
    done = subprocess.run([maven, *words], cwd=scratch, capture_output=True, text=True, timeout=FETCH_S, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
        reason = lines[0] if lines else f"exit code {done.returncode}"
        raise UsageError(f"Maven could not bring the broker's jars: {reason[:400]}")


def _pom(coordinates: Sequence[str]) -> str:
    rows = []
    for group, artifact, version in (one.split(":") for one in coordinates):
        about = f"<groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
        rows.append(f"<dependency>{about}</dependency>")
    head = "<modelVersion>4.0.0</modelVersion><groupId>steppe</groupId><artifactId>broker</artifactId>"
    return f"<project>{head}<version>1</version><dependencies>{''.join(rows)}</dependencies></project>"


def _cluster_id() -> str:
    """The tool that takes it reads one that begins with a dash as an option."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "_")


def _free_port() -> int:
    """Below those that the system gives to clients: one that tries to reach a broker which is away could get its port."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _require_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            words = f"port {port} of {host} cannot be had ({error.strerror}): give another with --port"
            raise UsageError(words) from None


def _process_start_ticks(pid: int) -> int | None:
    """When a process began, in the kernel's ticks; None when there is none, or only its zombie.

    One whose first thread has ended is there until the others have: so long it holds its port.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None
    if state == b"Z" and threads == 1:
        with contextlib.suppress(ChildProcessError):  # another's child
            os.waitpid(pid, os.WNOHANG)
        return None
    return None if state == b"X" else int(rest[18])
