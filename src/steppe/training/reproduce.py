"""Reproduce an environment's fault: repeat the actor's recorded actions in the same environment, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.config import references
from steppe.core.config.run import RunConfig
from steppe.core.contracts.env import SegmentEnv, num_rows
from steppe.core.contracts.errors import CannotResume, DamagedFile, EnvironmentFault
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.io import codec
from steppe.core.system.typecheck import typechecked
from steppe.envs import make_segment_env
from steppe.records.faults import Faults
from steppe.records.run_directory import RunDirectory
from steppe.roles.actor import env_seeds

LOCATION_KEYS = ("env_index", "episode", "step")


@dataclass(frozen=True)
class RaisedError:
    """What an environment raised, and where: environment, episode and step within it, as far as they are known."""

    exception: str
    message: str
    place: dict[str, int | None]
    traceback: str

    @classmethod
    def of(cls, exception: str, message: str, details: Mapping[str, Any]) -> RaisedError:
        """Create it from the details of an EnvironmentFault."""
        place = {key: details.get(key) for key in LOCATION_KEYS}
        return cls(exception, message, place, str(details.get("traceback", "")))


@dataclass(frozen=True)
class Reproduction:
    """The recorded fault and the one found now; `notes` list what could not be restored as it was."""

    run: str
    recording: Path
    actor: int
    steps: int  # that were repeated
    recorded: RaisedError
    found: RaisedError | None
    notes: tuple[str, ...] = ()

    @property
    def matched(self) -> bool:
        """Whether the same type of exception was raised at the same step."""
        found = self.found
        return found is not None and (found.exception, found.place) == (self.recorded.exception, self.recorded.place)


@typechecked
def reproduce(run: str | Path, fault: int | None = None) -> Reproduction:
    """Repeat what led to a recorded fault (default: the newest), and report whether it happens again."""
    references.stop_if_loading_main()
    directory = RunDirectory.open(run)
    path, saved = Faults(directory).load(fault)
    try:
        actor, actions, origin, complete = (
            int(saved["actor"]),
            saved["actions"],
            dict(saved["origin"]),
            bool(saved["whole"]),
        )
        recorded = RaisedError.of(str(saved["exception"]), str(saved["message"]), saved["details"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(f"{path} does not describe a fault: {type(error).__name__}: {error}") from None
    found, notes = _replay_actions(directory.config(), actor, origin, actions)
    if not complete:
        notes.insert(0, "its environments have no snapshots and the run was long: only the last actions were kept")
    steps = 0 if actions is None else len(actions)
    return Reproduction(directory.id, path, actor, steps, recorded, found, tuple(notes))


def _replay_actions(
    config: RunConfig, actor: int, origin: dict[str, Any], actions: np.ndarray | None
) -> tuple[RaisedError | None, list[str]]:
    """Return the error that the environment raises, if any, and notes on what could not be restored."""
    assert config.envs is not None, "the configuration of a run says how many environments there are"
    notes: list[str] = []
    env = make_segment_env(config.env, config.environment, config.envs, env_seeds(config.seed, actor))
    try:
        notes += _restore_origin(env, config, actor, origin)
        row = Segment.blank(SegmentSpec(1, num_rows(env), env.spec.obs, env.spec.action.field))
        for action in () if actions is None else actions:
            env.step(action, row, 0)
    except EnvironmentFault as fault:
        return RaisedError.of(type(fault.__cause__ or fault).__name__, str(fault), fault.details), notes
    finally:
        env.close()
    return None, notes


def _restore_origin(env: SegmentEnv, config: RunConfig, actor: int, origin: dict[str, Any]) -> list[str]:
    """Restore the environment where the recorded actions began; return notes on what could not be restored."""
    obs = np.zeros((num_rows(env), *env.spec.obs.shape), env.spec.obs.dtype)
    if "state" not in origin:
        after = origin["after"]
        env.reset(obs, None if after is None else env_seeds(config.seed, actor, after=after))
        return []
    try:
        env.restore(codec.unpack(origin["state"])["world"])
    except CannotResume as reason:
        env.reset(obs)
        return [f"the environments could not be restored and began new episodes: {reason}"]
    return []
