"""The `ray` runtime: one Ray actor per worker slot, on the run's own cluster or on an existing one.

This process supervises without importing Ray: a separate driver (driver.py) joins the cluster, and the run's end is
recorded here, whatever happens to the driver and the cluster. A program that has called `ray.init` is its own driver.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import socket
import sys
from pathlib import Path

from steppe.core.contracts.errors import ConfigError, MissingExtra, UsageError
from steppe.core.system.shared_dir import make_shared_dir, remove_shared_dir
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.handle import Fault, Handle
from steppe.runtimes.launch_spec import LaunchSpec, import_path
from steppe.runtimes.plan import Plan
from steppe.runtimes.subprocess_driver.parent import SubprocessHandle

BOOTSTRAP_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from steppe.runtimes.ray import driver; driver.main()"
)
CONNECT_TIMEOUT_S = 5.0


def require(plan: Plan) -> None:
    """Raise, before anything is written, if this plan cannot run here."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtra("runtime 'ray'", "ray")
    config = plan.config
    if is_ray_driver() and config.ray.address is not None:
        raise ConfigError("this program has called ray.init, and the run goes there: leave ray.address out")
    if (is_ray_driver() or config.ray.address is not None) and config.ray.object_store_mb is not None:
        raise ConfigError(
            "ray.object_store_mb is for a cluster of the run's own: leave it out, or leave ray.address out"
        )
    if config.flow.actor_device.startswith("cuda") and not config.ray.actor_gpus:
        raise ConfigError("flow.actor_device is a GPU, which Ray hides from actors: set ray.actor_gpus, as 0.25")
    if config.ray.address not in (None, "auto"):
        host, _, port = (config.ray.address or "").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise UsageError(
                f"there is no Ray cluster at {config.ray.address} ({error.strerror or error}): start one with "
                "`ray start --head`, or leave --ray-address out"
            ) from None


def is_ray_driver() -> bool:
    """Whether this process is already the driver of a Ray cluster."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def launch(plan: Plan, directory: RunDirectory) -> Handle:
    """Start the run's Ray actors, or the driver that starts them."""
    require(plan)
    if is_ray_driver():
        from steppe.core.config import references
        from steppe.runtimes.ray.driver import RayDriverHandle
        from steppe.runtimes.ray.placement import RayCluster

        return RayDriverHandle(LaunchSpec.of(plan, directory, references.main_script()), directory, RayCluster(plan))
    return RayHandle(plan, directory)


class RayHandle(SubprocessHandle):
    """A run on a Ray cluster, controlled by a separate driver process."""

    name, log = "the Ray driver", "ray.log"
    reap_s = 8.0  # a cluster takes longer to shut down than a process

    def __init__(self, plan: Plan, directory: RunDirectory) -> None:
        self._shared_dir = make_shared_dir("ray", 1, base=Path("/tmp"))  # a short path: Ray creates sockets in it
        path = json.dumps(import_path())
        try:
            super().__init__(plan, directory, [sys.executable, "-P", "-c", BOOTSTRAP_CODE, path, str(self._shared_dir)])
        except BaseException:
            remove_shared_dir(self._shared_dir)
            raise

    def _terminate(self) -> None:
        try:
            super()._terminate()
        finally:
            self._keep_logs()
            remove_shared_dir(self._shared_dir)

    def _explain(self) -> Fault:
        fault = super()._explain()
        return Fault(fault.role, fault.reason, f"{fault.message} (is the cluster's head still running?)", fault.details)

    def _keep_logs(self) -> None:
        """Copy the cluster's own error logs to the run directory, if the run failed."""
        if self._fault is None:
            return
        for found in self._shared_dir.glob("session_2*/logs/*.err"):
            if found.stat().st_size:
                with contextlib.suppress(OSError):
                    shutil.copy(found, self._directory.path / "logs" / f"ray-{found.name}")
