"""A complete training run in a cluster with a fake node, which runs the images' commands as local processes.

Each pod of the Deployments has its environment variables, its ConfigMap and its SIGTERM; Kafka is a real broker. The service
observes the run only through Kubernetes and Kafka. The tests count acknowledged segments in the topic.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.support.commands import free_port
from tests.support.kube import ROOT, apply, rendered, until
from tests.support.kube_node import Life, StandIn
from tests.support.service import Served, finished

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
RUN = "/api/v1/runs/demo"
SMALL = """
env = "steppe/Sleep-v0"
mode = "async"
actors = 8
envs = 1
seed = 3
steps = 500000000
agent.hidden = [16]
agent.segment_steps = 32
agent.epochs = 1
agent.minibatch_size = 32
evaluation.episodes = 1
evaluation.every_steps = 100000000
flow.max_lag = 1000
flow.slots_per_actor = 4
flow.record_arrivals = true
kafka.partitions = 4
"""  # environments that sleep: one actor is too slow for its learner on any machine
STEPS = 32  # of a segment
ENTRY = re.compile(r"^ENTRYPOINT (\[.*\])$", re.MULTILINE)
SEGMENTS = "steppe_learner_segments_total"


class RoleLife(Life):
    """Runs a container's command as a local process with its own port and directories."""

    home: Path
    plane: object

    def __init__(self, pod):
        super().__init__(pod)
        self.role = pod["metadata"]["labels"].get("steppe.dev/role")
        self.process, self.port = None, free_port()
        if self.role is None:
            return  # the API and Kafka run outside of the cluster in this test
        [container] = pod["spec"]["containers"]
        # A learner's volume outlives its pod.
        self.directory = self.home / ("learner" if self.role == "learner" else pod["metadata"]["name"])
        self.directory.mkdir(exist_ok=True)
        (self.directory / "run.toml").write_text(self._config_map("steppe-run")["run.toml"])
        variables = self._variables(container)
        image = container["image"].partition(":")[0].removeprefix("steppe-")
        entry = json.loads(ENTRY.search((ROOT / "deploy" / "docker" / f"Dockerfile.{image}").read_text())[1])
        words = [*(container.get("command") or entry), *container["args"]]
        assert words[0] == "entrypoint"  # which becomes steppe
        own = {"9400": str(self.port), "/etc/steppe/run.toml": str(self.directory / "run.toml")}
        words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], own.get(verb, verb)) for verb in words[1:]]
        line = [sys.executable, "-c", "from steppe.cli.main import entry; entry()", *words]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPPE_")}
        environ = (
            kept
            | variables
            | {"STEPPE_RUNS": str(self.directory / "runs"), "TERMINATION_LOG": f"{self.directory}/verb"}
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(line, env=environ, stdout=log, stderr=subprocess.STDOUT, cwd=self.directory)

    @property
    def log(self):
        return self.home / f"{self.pod['metadata']['name']}.log"

    def _config_map(self, name):
        with self.plane.client() as client:
            path = f"/api/v1/namespaces/{self.pod['metadata']['namespace']}/configmaps/{name}"
            return client.get(path).raise_for_status().json()["data"]

    def _variables(self, container):
        found = {}
        for source in container["envFrom"]:
            found |= self._config_map(source["configMapRef"]["name"])
        for one in container["env"]:
            source = one.get("valueFrom", {}).get("configMapKeyRef")
            found[one["name"]] = self._config_map(source["name"])[source["key"]] if source else one["value"]
        return found

    def ready(self):
        return self.process is None or self.get("/readyz") is not None

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.read().decode()
        except OSError:  # it does not listen yet, or answers that it is not ready
            return None

    def sample(self, name):
        """Return the sum of a metric over its labels."""
        text = self.get("/metrics") or ""
        return sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))

    def events(self, kind):
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        assert {(line["run"], line["role"]) for line in lines} <= {("demo", self.role)}
        return [line["details"] for line in lines if line["kind"] == kind]

    def ended(self):
        return None if self.process is None else self.process.poll()

    def stop(self):
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(self.pod["spec"]["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Cluster(StandIn):
    """The fake node, with access to the roles that it runs."""

    def of(self, role):
        return [life for life in list(self.lives.values()) if life.role == role]

    @property
    def learner(self):
        [life] = self.of("learner")
        return life


@pytest.fixture
def brokers(kafka):
    """Return the Kafka settings of the roles, with a topic prefix for this test."""
    return {"STEPPE_KAFKA__ADDRESS": kafka, "STEPPE_KAFKA__PREFIX": f"t{uuid.uuid4().hex[:8]}."}


@pytest.fixture
def cluster(plane, brokers, tmp_path):
    """Yield a node for a namespace with the base manifests and a small run."""
    name = f"t{uuid.uuid4().hex[:8]}"
    manifests = rendered(plane, "base", name)
    maps = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "ConfigMap"}
    maps["steppe-run"]["data"] = {"run": "demo", "run.toml": SMALL}
    maps["steppe-kafka"]["data"] = brokers
    apply(plane, manifests)
    with Cluster(plane, name, type("Here", (RoleLife,), {"home": tmp_path, "plane": plane})) as node:
        node.namespace = name
        yield node


@pytest.fixture
def served(plane, cluster, brokers, tmp_path, monkeypatch):
    """A service that is not started yet, with the permissions of the API in the cluster."""
    token = plane.account_token(cluster.namespace, "steppe-api")
    monkeypatch.setenv("KUBECONFIG", str(plane.write_kubeconfig(cluster.namespace, token)))
    made = Served(tmp_path)
    made.environ |= brokers
    yield made
    if made.process is not None:
        made.stop()


def acknowledged(brokers) -> list[tuple[int, int]]:
    """Return actor and sequence of every acknowledged segment, except those of processes that were replaced."""
    address, topic = brokers["STEPPE_KAFKA__ADDRESS"], brokers["STEPPE_KAFKA__PREFIX"] + "experiences"
    consumer = Consumer({"bootstrap.servers": address, "group.id": "test", "enable.auto.commit": False})
    found, lives = [], {}
    try:
        for number in consumer.list_topics(topic).topics[topic].partitions:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, number))
            consumer.assign([TopicPartition(topic, number, low)])
            position = low
            while position < high:
                message = consumer.poll(10.0)
                assert message is not None
                assert message.error() is None
                position = message.offset() + 1
                about = dict(message.headers())
                actor, life = _int64(about["actor"]), _int64(about.get("life", b"\xff" * 8))
                if about["kind"] == b"begin":
                    lives[actor] = message.offset()
                elif about["kind"] == b"segment" and life >= lives[actor]:
                    found.append((actor, _int64(about["sequence"])))
    finally:
        consumer.close()
    return found


def _int64(data: bytes) -> int:
    return struct.unpack("<q", data)[0]


def taken(learner: RoleLife) -> list[tuple[int, int]]:
    """Return actor and sequence of every segment that the learner recorded as taken."""
    text = (learner.directory / "runs" / "demo" / "arrivals.jsonl").read_text()
    takes = [json.loads(line).get("take", []) for line in text.splitlines()]
    return [(actor, sequence) for take in takes for actor, sequence, *_ in take]


def begins(learner: RoleLife) -> list[dict[str, int]]:
    """Return the counters that each start of the learner recorded."""
    text = (learner.directory / "runs" / "demo" / "arrivals.jsonl").read_text()
    return [line["begin"] for line in map(json.loads, text.splitlines()) if "begin" in line]


def wait_until_learned(learner: RoleLife, more: int) -> None:
    before = learner.sample(SEGMENTS)
    until(lambda: learner.sample(SEGMENTS) > before + more, f"{more} further segments are learned from")


def scale(api, cluster, actors):
    done = finished(api, api.put(f"{RUN}/actors", json={"actors": actors}))
    assert done["state"] == "succeeded", done
    assert len(cluster.of("actor")) == actors


def scale_learner(api, count):
    done = finished(api, api.put(f"{RUN}/learner", json={"learner": count}))
    assert done["state"] == "succeeded", done
    return done["message"]


def notes(api, role):
    events = api.get(f"{RUN}/events", params={"limit": 1_000}).json()["events"]
    return [event["details"] for event in events if event["kind"] == "note" and event["role"] == role]


def test_a_run_is_scaled_and_no_acknowledged_segment_is_lost(cluster, served, brokers):
    # One actor is too few for its learner, as their reports on Kafka show.
    served.start("--kubernetes", cluster.namespace, "--autoscale", "set")
    with served.client() as api:
        until(lambda: api.get(RUN).json()["state"] == "RUNNING", "the run is running")
        [found] = until(
            lambda: [note for note in notes(api, "autoscaler") if note["what"] == "set"], "the autoscaler adds an actor"
        )
        assert (found["actors"], found["wanted"], found["reason"]) == (1, 2, "starving")
        until(
            lambda: (seen := api.get(f"{RUN}/actors").json())["desired"] == seen["ready"] == 2, "two actors are ready"
        )
    served.stop()

    # Manual scaling, with a restarted service that continues to read reports.
    served.start("--kubernetes", cluster.namespace)
    with served.client() as api:
        scale(api, cluster, 8)
        wait_until_learned(cluster.learner, 50)
        until(lambda: {actor for actor, _ in taken(cluster.learner)} == set(range(8)), "all eight are learned from")

        # The learner stops with a checkpoint, and another one continues from it.
        first = cluster.learner
        assert scale_learner(api, 0) == "the learner ended normally, with a checkpoint"
        assert first.process.returncode == 0
        saved = first.events("checkpoint")[-1]
        assert saved["env_steps"] == STEPS * len(taken(first))
        scale_learner(api, 1)
        wait_until_learned(cluster.learner, 50)
        [_, restored] = begins(cluster.learner)
        assert (restored["env_steps"], restored["updates"]) == (saved["env_steps"], saved["updates"])

        scale(api, cluster, 2)
        wait_until_learned(cluster.learner, 5)
        scale(api, cluster, 0)

        # The learner has taken every acknowledged segment once.
        sent = acknowledged(brokers)
        until(lambda: len(taken(cluster.learner)) >= len(sent), "the learner has taken every segment")
        assert sorted(taken(cluster.learner)) == sorted(sent)
        for actor in range(8):
            numbers = sorted(sequence for one, sequence in sent if one == actor)
            assert numbers == list(range(len(numbers)))
            assert numbers

        # The service has read everything from Kafka.
        steps = STEPS * len(sent)
        until(
            lambda: api.get(RUN).json()["progress"]["env_steps"] == steps,
            "the service has read the reports of all steps",
        )
        [value] = re.findall(
            r'^steppe_learner_env_steps_total{run="demo"} (\S+)$', api.get("/metrics").text, re.MULTILINE
        )
        assert float(value) == steps
        curves = api.get(f"{RUN}/metrics").json()
        assert {len(curve["points"]) > 1 for curve in curves["series"] if curve["name"].startswith("train")} == {True}
        assert api.get(f"{RUN}/diagnosis").json()["lags"]


def test_live_hyperparameters_are_sent_over_kafka_and_others_replace_the_learner(plane, cluster, served):
    served.start("--kubernetes", cluster.namespace)
    with served.client() as api:
        until(lambda: api.get(RUN).json()["state"] == "RUNNING", "the run is running")
        wait_until_learned(cluster.learner, 5)
        first, path = cluster.learner, f"{RUN}/hyperparameters"
        done = finished(api, api.patch(path, json={"values": {"learning_rate": 0.0125}}))
        assert (done["state"], "in effect from version" in done["message"]) == ("succeeded", True), done
        for verb, state in (("pause", "PAUSED"), ("resume", "RUNNING")):
            assert finished(api, api.post(f"{RUN}/{verb}"))["state"] == "succeeded"
            assert api.get(RUN).json()["state"] == state
        wait_until_learned(first, 5)
        assert cluster.learner is first
        answers = [
            one
            for one in api.get(f"{RUN}/events", params={"limit": 1_000}).json()["events"]
            if one["kind"] == "command"
        ]
        assert {one["details"]["command"] for one in answers if one["role"] == "learner"} == {"set", "pause", "resume"}

        assert finished(api, api.patch(path, json={"values": {"max_grad_norm": 0.25}}))["state"] == "succeeded"
        assert cluster.learner is not first
        wait_until_learned(cluster.learner, 5)
        found = {one["name"]: one["value"] for one in api.get(path).json()["hyperparameters"]}
        assert (found["learning_rate"], found["max_grad_norm"]) == (0.0125, 0.25), "the live value is kept"
