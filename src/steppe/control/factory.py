"""Make a service with its backend."""

from __future__ import annotations

from collections.abc import Callable

from steppe.control.backends.base import Backend
from steppe.control.backends.orchestrator import Orchestrator
from steppe.control.commands import CommandSender
from steppe.control.repository import RunRepository
from steppe.control.run_requests import Bounds
from steppe.control.service import Service
from steppe.core.config.run import KafkaConfig


def make_local_service(bounds: Bounds | None = None, kafka: KafkaConfig | None = None) -> Service:
    """Make a service of runs in processes of this machine.

    With `kafka`, runs use those brokers; raises Unreachable if none answers.
    """
    from steppe.control.backends.local import LocalBackend

    bounds, runs = bounds or Bounds(), RunRepository()
    commands = CommandSender(runs)
    return _assemble(runs, commands, bounds, lambda: LocalBackend(runs, commands, bounds, kafka))


def make_external_service(run: str, kafka: KafkaConfig, bounds: Bounds | None = None) -> Service:
    """Make a service of one externally managed run over Kafka; raises Unreachable if no broker answers."""
    from steppe.control.backends.external import ExternalBackend

    runs = RunRepository(only=run)
    commands = CommandSender(runs, mirrored_to=kafka)
    return _assemble(runs, commands, bounds or Bounds(), lambda: ExternalBackend(run, runs, commands, kafka))


def make_kubernetes_service(
    orchestrator: Orchestrator, bounds: Bounds | None = None, kafka: KafkaConfig | None = None
) -> Service:
    """Make a service of the run of a cluster; with `kafka`, it also reads what the roles report there."""
    from steppe.control.backends.kubernetes import KubernetesBackend

    bounds, runs = bounds or Bounds(), RunRepository()
    commands = CommandSender(runs, mirrored_to=kafka)
    return _assemble(runs, commands, bounds, lambda: KubernetesBackend(orchestrator, runs, commands, bounds, kafka))


def _assemble(runs: RunRepository, commands: CommandSender, bounds: Bounds, make: Callable[[], Backend]) -> Service:
    try:
        return Service(runs, commands, make(), bounds)
    except BaseException:
        runs.close()
        raise
