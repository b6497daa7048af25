"""A Kafka broker on this machine, for development and tests: one Java process in KRaft mode on loopback.

The jars come from Maven by their coordinates, are verified, and have their own directory.

    $STEPPE_KAFKA_HOME, or ~/.cache/steppe/kafka
      jars-VERSION/     the files that kafka-jars.lock lists, each with its sha256
      broker/           server.properties, data/, broker.log, broker.json with the process ID
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
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BrokerProcess(msgspec.Struct, frozen=True):
    """The process of a broker, as stored in broker.json."""

    pid: int
    started: int  # in clock ticks since boot: a pid alone may have been reused
    address: str


@dataclass(frozen=True)
class DevBroker:
    """A broker whose files are all in `home`. Only one process may start or stop it at a time."""

    home: Path
    jars: Path
    heap_mb: int = HEAP_MB
    host: str = "127.0.0.1"  # the address that it listens on and advertises

    @classmethod
    def default(cls) -> DevBroker:
        """Return the broker of `steppe kafka up`."""
        cache = cache_directory()
        return cls(cache / "broker", cache / f"jars-{VERSION}")

    def running(self) -> BrokerProcess | None:
        """Return the broker's process if it is running."""
        try:
            known = msgspec.json.decode((self.home / "broker.json").read_bytes(), type=BrokerProcess)
        except (OSError, msgspec.DecodeError):
            return None
        return known if _process_start_ticks(known.pid) == known.started else None

    def up(self, port: int = 9092) -> BrokerProcess:
        """Start the broker unless it is running, and wait until it accepts connections; port 0 chooses a port.

        Port 0 reuses the previous port, or else takes a free one.
        """
        if (known := self.running()) is not None:
            return known
        java = find_java()
        self.home.mkdir(parents=True, exist_ok=True)
        port = port or self._previous_port() or _free_port()
        _require_free(self.host, port)
        self._configure(port)
        if not (self.home / "data" / "meta.properties").exists():
            self._format(java)
        running = self._start(java, port)
        self._await(running.pid, port)
        return running

    def describe_crash(self) -> str:
        """Return a clause that says that the broker ended without being stopped; empty if it did not."""
        if self.running() is not None or not (self.home / "broker.json").exists():
            return ""
        return f", and the last one was not stopped ({self.describe_last_error()})"

    def down(self, timeout_s: float = STOP_S) -> bool:
        """Stop the broker, with SIGKILL after `timeout_s`; return whether it was running."""
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
        """Kill the broker with SIGKILL, as a crash would."""
        if (known := self.running()) is not None:
            self._signal(known, signal.SIGKILL)
            while self.running() is not None:
                time.sleep(0.01)

    def _signal(self, known: BrokerProcess, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(known.pid, number)

    def _previous_port(self) -> int | None:
        """Return the port it had before, so that clients with its address find it again."""
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
        """Return the contents of server.properties."""
        controller = _free_port()
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": f"PLAINTEXT://{self.host}:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.host}:{port}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "broker.heartbeat.interval.ms": 500,
            "broker.session.timeout.ms": 2_000,  # how long the controller waits for a dead broker after a crash
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
        """Return the arguments of the storage tool that formats the data directory."""
        return ["format", "--cluster-id", _cluster_id(), "--config", str(self.home / "server.properties")]

    def _format(self, java: str) -> None:
        arguments = self.format_arguments()
        done = subprocess.run(
            [*self._java(java), "kafka.tools.StorageTool", *arguments], capture_output=True, text=True, timeout=START_S
        )
        if done.returncode:
            raise UsageError(f"the broker's storage in {self.home} cannot be made: {done.stderr.strip()[-400:]}")

    def _start(self, java: str, port: int) -> BrokerProcess:
        """Spawn the broker and write broker.json. Signals wait until both are done, as `down` finds the broker by that file."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        try:
            pid = self._spawn(java, before)
            running = BrokerProcess(pid, _process_start_ticks(pid) or 0, f"{self.host}:{port}")
            write_atomic(self.home / "broker.json", msgspec.json.encode(running))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return running

    def _spawn(self, java: str, signal_mask: set[int | signal.Signals]) -> int:
        """Spawn the broker and return its pid; not with subprocess, as the broker outlives this process."""
        command = [*self._java(java), "kafka.Kafka", str(self.home / "server.properties")]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        nothing, log = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), str(self.home / "broker.log")
        actions = [nothing, (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)]
        return os.posix_spawn(java, command, os.environ, file_actions=actions, setsid=True, setsigmask=signal_mask)

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
        """Return the path of the broker's log and the last line in it that reports an error."""
        lines = self._text("broker.log").splitlines()
        errors = [line for line in lines if "Exception: " in line] or [line for line in lines if "ERROR" in line]
        return f"its output is in {self.home / 'broker.log'}: {errors[-1].strip()[:300] if errors else 'no errors'}"


def cache_directory() -> Path:
    """Return the directory of the jars and the default broker."""
    given = os.environ.get("STEPPE_KAFKA_HOME")
    return (
        Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steppe" / "kafka"
    )


def find_java() -> str:
    """Return the path of a Java that is new enough. UsageError if there is none."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if java is None:
        raise UsageError(f"a Kafka broker needs Java {MIN_JAVA} or newer, and there is no java here: install it")
    output = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=START_S, check=False).stderr
    found = re.search(r'version "(\d+)', output)
    if found is None or int(found[1]) < MIN_JAVA:
        version = output.splitlines()[0] if output else "unknown"
        raise UsageError(f"a Kafka broker needs Java {MIN_JAVA} or newer, but {java} says {version}")
    return java


def fetch_jars(target: Path) -> Path:
    """Fetch the jars with Maven into `target`, unless they are there and match the lock file; return `target`."""
    expected = read_jar_lock()
    if target.is_dir() and not find_jar_differences(target, expected):
        return target
    maven = shutil.which("mvn")
    if maven is None:
        raise UsageError(
            f"the broker's jars come with Maven, and there is no mvn here: install it, or put the libs of Kafka {VERSION} "
            f"into {target}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        found = Path(scratch) / "jars"
        _run_maven(maven, Path(scratch), found)
        if errors := find_jar_differences(found, expected):
            raise DamagedFile(f"the jars that Maven fetched are not those of {LOCK.name}: {'; '.join(errors[:3])}")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(found, target)
    return target


def read_jar_lock() -> dict[str, str]:
    """Return the name of each jar → its sha256."""
    rows = [line.split() for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return {name: digest for digest, name in rows}


def find_jar_differences(jars: Path, expected: dict[str, str]) -> list[str]:
    """Return one sentence for each missing, unexpected or changed jar in a directory."""
    found = {path.name: path for path in jars.glob("*.jar")}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} does not belong there" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        if hashlib.sha256(found[name].read_bytes()).hexdigest() != expected[name]:
            problems.append(f"{name} has another sha256")
    return problems


def _run_maven(maven: str, scratch: Path, target: Path) -> None:
    (scratch / "pom.xml").write_text(_pom(COORDINATES))
    arguments = ["-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={target}"]
    done = subprocess.run(
        [maven, *arguments], cwd=scratch, capture_output=True, text=True, timeout=FETCH_S, check=False
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
        reason = lines[0] if lines else f"exit code {done.returncode}"
        raise UsageError(f"Maven could not fetch the broker's jars: {reason[:400]}")


def _pom(coordinates: Sequence[str]) -> str:
    rows = []
    for group, artifact, version in (one.split(":") for one in coordinates):
        dependency = f"<groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
        rows.append(f"<dependency>{dependency}</dependency>")
    head = "<modelVersion>4.0.0</modelVersion><groupId>steppe</groupId><artifactId>broker</artifactId>"
    return f"<project>{head}<version>1</version><dependencies>{''.join(rows)}</dependencies></project>"


def _cluster_id() -> str:
    """Return a random cluster ID without dashes: the storage tool would read a leading dash as an option."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "_")


def _free_port() -> int:
    """Return a free port below the ephemeral range.

    In that range, a client that tries to connect to a stopped broker could be given the broker's port.
    """
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
            message = f"port {port} of {host} is not available ({error.strerror}): give another with --port"
            raise UsageError(message) from None


def _process_start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it does not exist or is a zombie.

    A process whose first thread has ended exists until the other threads have: until then it holds its port.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None
    if state == b"Z" and threads == 1:
        with contextlib.suppress(ChildProcessError):  # the child of another process
            os.waitpid(pid, os.WNOHANG)
        return None
    return None if state == b"X" else int(rest[18])
