"""Deployment files without a container engine: scripts are run; YAML and Dockerfiles are parsed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DIGEST = "sha256:" + "ab" * 32


def run(*words, **options):
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.fixture
def programs(tmp_path):
    """Return a function that writes programs to a directory at the front of `path`."""
    directory = tmp_path / "bin"
    directory.mkdir()

    def write_program(name, text):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)

    write_program.path = f"{directory}:{os.environ['PATH']}"
    return write_program


def test_digests_of_base_images_are_written_and_updated(tmp_path, programs):
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy)
    programs("docker", f"#!/bin/sh\necho {DIGEST}\n")
    environ = os.environ | {"PATH": programs.path}
    pin = [sys.executable, ROOT / "scripts" / "pin-images", "--root", copy]
    assert run(*pin, "--check").returncode == 1
    for _ in range(2):
        done = run(*pin, env=environ)
        assert done.returncode == 0, done.stderr
    assert run(*pin, "--check").stdout.strip() == "every base image is pinned"
    for name in ("actor", "learner", "api"):
        assert f"ARG PYTHON_DIGEST=@{DIGEST}\n" in (copy / "docker" / f"Dockerfile.{name}").read_text()
    compose = yaml.safe_load((copy / "docker-compose.yaml").read_text())
    assert compose["services"]["kafka"]["image"] == f"${{KAFKA_IMAGE:-apache/kafka:4.1.0@{DIGEST}}}"
    kafka = list(yaml.safe_load_all((copy / "k8s" / "base" / "kafka.yaml").read_text()))
    [container] = next(one for one in kafka if one["kind"] == "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"apache/kafka:4.1.0@{DIGEST}"


def test_invalid_digests_are_not_written(tmp_path, programs):
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy)
    programs("docker", "#!/bin/sh\necho nonsense\n")
    done = run(
        sys.executable, ROOT / "scripts" / "pin-images", "--root", copy, env=os.environ | {"PATH": programs.path}
    )
    assert done.returncode == 1
    assert "is not a digest" in done.stderr
    assert "nonsense" not in (copy / "docker" / "Dockerfile.actor").read_text()


def test_the_entry_point_prepares_the_environment_and_executes_steppe(tmp_path, programs):
    programs(
        "steppe", '#!/bin/sh\ntrap "exit 7" TERM\necho "$@" "$STEPPE_KAFKA_PASSWORD" $$\nwhile :; do sleep 0.05; done\n'
    )
    kernels, secret = tmp_path / "kernels", tmp_path / "secret"
    kernels.mkdir()
    (kernels / "one.nbi").write_text("compiled")
    secret.write_text("hush\n")
    environ = {
        "PATH": programs.path, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "KERNELS": str(kernels),
        "KAFKA_PASSWORD_FILE": str(secret),
    }  # fmt: skip
    line = [DEPLOY / "docker" / "entrypoint.sh", "role", "actor"]
    process = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, text=True)
    output = process.stdout.readline().split()
    assert output == ["role", "actor", "hush", str(process.pid)]  # the same process, so it receives signals
    assert (tmp_path / "cache" / "one.nbi").read_text() == "compiled"
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 7
    process.stdout.close()
    programs("steppe", '#!/bin/sh\necho "$@"\n')
    bare = run(*line, env=environ | {"KERNELS": str(tmp_path / "none"), "KAFKA_PASSWORD_FILE": "/dev/null"})
    assert (bare.returncode, bare.stdout) == (0, "role actor\n")


def test_the_health_check_needs_no_curl(tmp_path):
    import http.server
    import threading

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Healthy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert run(sys.executable, DEPLOY / "docker" / "healthy.py", server.server_port).returncode == 0
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert run(sys.executable, DEPLOY / "docker" / "healthy.py", server.server_port).returncode != 0


def test_compose_restricts_and_orders_its_containers():
    services = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"]
    for name in ("learner", "manager", "actor", "api"):
        service = services[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["depends_on"]["kafka"]["condition"] == "service_healthy"
        assert "STEPPE_KAFKA_PASSWORD" not in service["environment"]  # only from a file
    assert services["kafka"]["healthcheck"]["test"]
    assert "container_name" not in services["actor"]  # which would allow only one container
    assert all(port.startswith("127.0.0.1:") for name in ("api", "kafka") for port in services[name]["ports"])
    assert services["api"]["volumes"] == ["api:/runs"]  # its own volume, and no socket of the engine
    assert services["api"]["command"][-2:] == ["--run", services["learner"]["command"][1]]


@pytest.mark.parametrize("name", ["actor", "learner", "api"])
def test_images_run_as_a_user_with_a_health_check(name):
    text = (DEPLOY / "docker" / f"Dockerfile.{name}").read_text()
    assert text.count("\nFROM ") == 2
    final = text.rpartition("\nFROM ")[2]
    assert "\nUSER 10001:10001\n" in final
    assert "\nHEALTHCHECK " in final
    assert "uv pip install" not in final


@pytest.mark.parametrize("name", ["actor", "learner"])
def test_the_health_check_uses_the_metrics_port_of_the_role(name):
    text = (DEPLOY / "docker" / f"Dockerfile.{name}").read_text()
    entry = json.loads(text.rpartition("\nENTRYPOINT ")[2])
    health_command = json.loads(text.rpartition("\nHEALTHCHECK ")[2].partition(" CMD ")[2].splitlines()[0])
    assert entry[entry.index("--metrics-port") + 1] == health_command[-1]
    [pod] = [
        one
        for one in yaml.safe_load_all((DEPLOY / "k8s" / "base" / f"{name}.yaml").read_text())
        if one["kind"] == "Deployment"
    ]
    [container] = pod["spec"]["template"]["spec"]["containers"]
    assert [str(port["containerPort"]) for port in container["ports"]] == [health_command[-1]]
