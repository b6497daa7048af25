"""deploy/docker-compose.yaml, validated by docker-compose without an engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.kube import ROOT

pytestmark = pytest.mark.integration
FILE = ROOT / "deploy" / "docker-compose.yaml"


def compose(*words, file=FILE, **variables):
    line = [Path(os.environ["STEPPE_KUBE"]) / "docker-compose", "-f", file, *words]
    environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"} | variables
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=environ)


def project(**variables):
    done = compose("config", "--format", "json", **variables)
    assert (done.returncode, done.stderr) == (0, "")  # not even a warning about an unset variable
    return json.loads(done.stdout)


def test_the_file_is_valid_and_refers_to_existing_files():
    found = project()
    assert set(found["services"]) == {"kafka", "learner", "manager", "actor", "api"}
    for name in ("learner", "actor", "api"):
        build = found["services"][name]["build"]
        assert Path(build["context"]) == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
    assert Path(found["configs"]["run"]["file"]).read_text() == (ROOT / "deploy" / "run.toml").read_text()


def test_all_services_wait_for_a_healthy_broker_and_are_restricted():
    services = project()["services"]
    for name in ("learner", "manager", "actor", "api"):
        service = services[name]
        assert service["depends_on"]["kafka"]["condition"] == "service_healthy"
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert [one["source"] for one in service["secrets"]] == ["kafka_password"]
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert [port["host_ip"] for port in ports] == ["127.0.0.1"] * 2
    assert services["actor"]["deploy"]["replicas"] == 2


def test_documented_variables_have_an_effect(tmp_path):
    (tmp_path / "password").write_text("hush")
    variables = {"RUN": "second", "KAFKA": "far:9", "STEPPE_KAFKA__SECURITY": "sasl", "TORCH_BACKEND": "cu130"}
    found = project(KAFKA_PASSWORD_FILE=str(tmp_path / "password"), **variables)
    for name in ("learner", "manager", "actor", "api"):
        service = found["services"][name]
        assert service["command"][service["command"].index("--run") + 1] == "second"
        assert service["environment"]["STEPPE_KAFKA__ADDRESS"] == "far:9"
        assert service["environment"]["STEPPE_KAFKA__SECURITY"] == "sasl"
    assert found["services"]["learner"]["build"]["args"] == {"TORCH_BACKEND": "cu130"}
    assert found["secrets"]["kafka_password"]["file"] == str(tmp_path / "password")
    assert "hush" not in json.dumps(found)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("read_only: true", "readonly: true", "readonly"),
        ("networks: [inside]", "networks: [outside]", "undefined network"),
        ("condition: service_healthy", "condition: service_well", "depends_on.kafka.condition"),
    ],
)
def test_mistakes_in_the_file_are_found(tmp_path, right, wrong, message):
    text = FILE.read_text()
    assert right in text
    (tmp_path / "compose.yaml").write_text(text.replace(right, wrong))
    done = compose("config", "-q", file=tmp_path / "compose.yaml")
    assert done.returncode != 0
    assert message in done.stderr
