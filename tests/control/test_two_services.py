"""Two services on one broker with the same topics, and a run with the same name each: every service lists, executes and
answers commands of its own runs only."""

from __future__ import annotations

import contextlib
import uuid

import pytest

from steppe.control import process_host
from steppe.core.contracts.transport import COMMANDS
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.kafka.manifest import make_command, wire_name
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import KafkaConnection
from tests.support.kafka import Topics, settings
from tests.support.service import LONG, Served, bring_down, finished, in_state, make, run_of, until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = {**LONG, "actors": 1}
NAME = f"twin-{uuid.uuid4().hex[:8]}"  # each service has a run of this name; the clean-up finds files by it
TWIN = f"/api/v1/runs/{NAME}"


class OwnService:
    """One of the services, with its run NAME and a reader of that run's topics."""

    def __init__(self, root, config):
        root.mkdir()
        self.config = config
        self.served = Served(root, config.address, prefix=config.prefix)
        self.served.start()
        self.api = self.served.client()
        self.sent, self.topics = [], None

    def begin(self):
        """Create the run and start it."""
        make(self.api, SMALL, name=NAME, start=False)
        self.directory = RunDirectory(self.served.root / "runs" / NAME)
        self.topics = Topics(self.config, self.directory)
        self.ask(self.api.post(f"{TWIN}/start"))
        in_state(self.api, NAME, "RUNNING")

    def ask(self, answer):
        """Require that an operation requested over REST succeeds."""
        done = finished(self.api, answer)
        assert done["state"] == "succeeded", done
        self.sent.append(done["id"])

    def send_command(self, kind):
        """Send a command over Kafka, as an external client that knows the run's name and key."""
        board = KafkaBoard(KafkaConnection(self.config, wire_name(self.directory)), "stranger")
        sent = make_command(kind, "stranger")
        assert board.post(COMMANDS, sent)
        board.close()
        self.sent.append(sent["id"])

    def stored_commands(self):
        """Return the commands in the run's store."""
        return [record["command"] for _, record in self.directory.store.read(COMMANDS)]

    def operations(self):
        """Return the kind and issuer of all operations, oldest first."""
        found = self.api.get("/api/v1/operations", params={"limit": 100}).json()["operations"]
        return [(one["kind"], one["issuer"]) for one in reversed(found)]

    def rate(self):
        found = self.api.get(f"{TWIN}/hyperparameters").json()["hyperparameters"]
        return next(one["value"] for one in found if one["name"] == "learning_rate")

    def kill(self):
        """End the run at once, if there is one."""
        if self.topics is not None:
            process_host.kill_run_processes(self.directory.store.status())

    def close(self):
        self.api.close()
        if self.topics is not None:
            self.topics.close()
        bring_down(self.served)


@pytest.fixture
def services(kafka, tmp_path):
    config, made = settings(str(kafka)), []
    with contextlib.ExitStack() as stack:
        for name in ("one", "two"):
            made.append(OwnService(tmp_path / name, config))
            stack.callback(made[-1].close)
        stack.callback(
            lambda: [service.kill() for service in made]
        )  # first, so that no shared memory of that name is left
        yield made


def test_each_service_executes_and_shows_commands_of_its_own_runs_only(services):
    one, two = services
    make(one.api, SMALL, name="alone", start=False)
    for service in services:
        service.begin()
    assert [wire_name(service.directory).partition("~")[0] for service in services] == [NAME, NAME]
    listed = [[run["id"] for run in service.api.get("/api/v1/runs").json()["runs"]] for service in services]
    assert listed == [[NAME, "alone"], [NAME]]

    for service, rate in ((one, 0.01), (two, 0.02)):
        service.ask(service.api.patch(f"{TWIN}/hyperparameters", json={"values": {"learning_rate": rate}}))
    assert [service.rate() for service in services] == [0.01, 0.02]
    two.ask(two.api.post(f"{TWIN}/pause"))
    in_state(two.api, NAME, "PAUSED")
    assert run_of(one.api, NAME)["state"] == "RUNNING"
    one.ask(one.api.post(f"{TWIN}/stop"))
    in_state(one.api, NAME, "STOPPED")
    two.ask(two.api.post(f"{TWIN}/resume"))
    in_state(two.api, NAME, "RUNNING")

    two.send_command("stop")
    in_state(two.api, NAME, "STOPPED")
    one.send_command("start")
    until(lambda: run_of(one.api, NAME)["state"] == "RUNNING", "the service has executed the command")
    for service in services:
        for identity in service.sent:
            until(
                lambda service=service, identity=identity: service.topics.answers(identity), "the command is answered"
            )
    assert run_of(two.api, NAME)["state"] == "STOPPED", "the start command was for the other service"

    for service in services:
        assert [record["id"] for record in service.topics.commands()] == service.sent
        answers = [service.topics.answers(identity) for identity in service.sent]
        assert answers == [[(True, None)]] * len(service.sent), "each is answered once, in the topic of the run"
    assert [service.stored_commands() for service in services] == [["set", "stop"], ["set", "pause", "resume", "stop"]]
    rest = "token:admin"
    assert one.operations() == [("start", rest), ("set", rest), ("stop", rest), ("start", "kafka:stranger")]
    assert two.operations() == [("start", rest), ("set", rest), ("pause", rest), ("resume", rest)]
