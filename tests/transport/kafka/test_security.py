"""A broker that accepts only clients with a password, over TLS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.errors import Unreachable
from steppe.params.rpc.protocol import Tls
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import KafkaConnection, ensure_topics
from steppe.transport.kafka.dev_broker import DevBroker, _free_port
from tests.support.certificates import certificate
from tests.support.kafka import own_broker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
STEPPE = Path(sys.executable).with_name("steppe")
PASSWORD = "a secret of this test"


@dataclass(frozen=True)
class SaslBroker(DevBroker):
    """Clients use SASL over TLS; the broker itself uses another listener."""

    tls: Tls | None = None

    def settings(self, port):
        plain = super().settings(port)
        controller = str(plain["listeners"]).rpartition(",")[2]
        pem = self.home / "broker.pem"
        pem.write_text(Path(self.tls.key).read_text() + Path(self.tls.certificate).read_text())
        internal = f"INTERNAL://{self.host}:{_free_port()}"
        return plain | {
            "listeners": f"CLIENT://{self.host}:{port},{internal},{controller}",
            "advertised.listeners": f"CLIENT://localhost:{port},{internal}",
            "listener.security.protocol.map": "CLIENT:SASL_SSL,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "INTERNAL",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.client.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": pem,
        }

    def format_arguments(self):
        return [*super().format_arguments(), "--add-scram", f"SCRAM-SHA-512=[name=steppe,password={PASSWORD}]"]


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.fixture(scope="module")
def guarded(kafka, tls, tmp_path_factory):
    usual = own_broker(tmp_path_factory.mktemp("guarded"))
    broker = SaslBroker(usual.home, usual.jars, tls=tls)
    try:
        yield f"localhost:{broker.up(0).address.rpartition(':')[2]}"
    finally:
        broker.down()


def config(address, tls, **more):
    told = {"security": "sasl-tls", "username": "steppe", "ca": tls.certificate, "partitions": 2}
    return KafkaConfig(address=address, **{**told, **more})


@pytest.mark.slow
def test_the_right_password_is_accepted(guarded, tls, monkeypatch):
    monkeypatch.setenv("STEPPE_KAFKA_PASSWORD", PASSWORD)
    connection = KafkaConnection(config(guarded, tls, prefix="in."), "run~1")
    ensure_topics(connection)
    board = KafkaBoard(connection)
    assert board.post("events", {"k": 1}) == 1
    assert board.read("events") == [(1, {"k": 1})]
    board.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["another password", "no password", "another authority"])
def test_other_credentials_are_refused(how, guarded, tls, monkeypatch, tmp_path):
    monkeypatch.setenv("STEPPE_KAFKA_PASSWORD", PASSWORD if how != "another password" else "guessed")
    told = config(guarded, tls)
    if how == "no password":
        told = KafkaConfig(address=guarded)
    if how == "another authority":
        told = config(guarded, certificate(tmp_path, "stranger"))
    with pytest.raises(Unreachable, match="no Kafka broker answers"):
        KafkaConnection(told, "run~1").fetch_metadata(3.0)


@pytest.mark.slow
def test_a_run_takes_its_password_from_the_environment_and_stores_no_secret(guarded, tls, tmp_path):
    (tmp_path / "run.toml").write_text(
        f'[kafka]\nsecurity = "sasl-tls"\nusername = "steppe"\nca = "{tls.certificate}"\npartitions = 2\n'
    )
    small = "--envs 2 --steps 200 -s segment_steps=16 -s hidden=[8] -s epochs=1 -s minibatch_size=16".split()
    done = subprocess.run(
        [STEPPE, "train", "CartPole-v1", "--runtime", "kafka", "--kafka", guarded, "--config", tmp_path / "run.toml",
         *small, "-s", "evaluation.episodes=2", "--name", "run", "--json"],
        capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "STEPPE_KAFKA_PASSWORD": PASSWORD},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "SUCCEEDED"
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]
