"""Conformance suite for Memory, to inherit, and a scripted actor whose steps are also recorded in plain Python.

class TestMine(MemoryConformance):
    def make(self): return MyMemory(self.spec)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.algorithm import Learned, Memory
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.io import codec, row_chunks
from steppe.core.io.atomic_files import read_file, write_bundle
from steppe.core.io.rings import ROWS, Ring

SPEC = SegmentSpec(5, 3, FieldSpec("obs", (4,), "float32"), FieldSpec("action", (), "int64"))
POISON = np.nan  # written to every meaningless cell, so that reading one is detected


@dataclass(frozen=True)
class Step:
    """One step of one environment, with the sequence number of its segment."""

    env: int
    sequence: int
    obs: tuple[float, ...]
    action: int
    reward: float
    next_obs: tuple[float, ...]
    terminated: bool
    truncated: bool


class ScriptedActor:
    """Random episodes whose observations identify their origin: (actor, environment, episode, time).

    With `next_step`, the step after a cut only resets, as in Gymnasium's NEXT_STEP mode, and is not valid.
    `stream` draws the rewards and decides which steps end an episode.
    """

    def __init__(self, spec: SegmentSpec = SPEC, actor: int = 0, seed: int = 0, *, next_step: bool = False) -> None:
        self.spec, self.actor, self.next_step = spec, actor, next_step
        self.sequence = 0
        self.steps: list[Step] = []
        self.stream = np.random.default_rng([seed, actor])
        self._episode = np.zeros(spec.num_envs, int)
        self._time = np.zeros(spec.num_envs, int)
        self._resets = np.zeros(spec.num_envs, bool)

    def segment(self, version: int = 0) -> Segment:
        """Return the next segment and append its steps to `steps`."""
        segment = Segment.blank(self.spec)
        for column in segment.columns.values():
            column[...] = POISON if column.dtype.kind == "f" else 0
        segment["obs"][0] = [self._observed(env) for env in range(self.spec.num_envs)]
        for t in range(self.spec.num_steps):
            for env in range(self.spec.num_envs):
                self._step(segment, t, env)
        segment.header = SegmentHeader("scripted", self.actor, 0, self.sequence, version)
        self.sequence += 1
        return segment

    def restart_episode(self) -> None:
        """Abandon all episodes without a cut, like an actor that was killed and restarted."""
        self._episode += 1
        self._time[:] = 0
        self._resets[:] = False

    def _observed(self, env: int) -> tuple[float, ...]:
        return (float(self.actor), float(env), float(self._episode[env]), float(self._time[env]))

    def _step(self, segment: Segment, t: int, env: int) -> None:
        if self._resets[env]:
            self._resets[env] = False
            self._episode[env] += 1
            self._time[env] = 0
            segment["obs"][t + 1, env] = self._observed(env)
            return
        obs = self._observed(env)
        self._time[env] += 1
        reward = float(np.float32(self.stream.normal()))
        terminated, truncated = bool(self.stream.random() < 0.15), bool(self.stream.random() < 0.15)
        step = Step(env, self.sequence, obs, int(self._time[env]), reward, self._observed(env), terminated, truncated)
        self.steps.append(step)
        segment["action"][t, env], segment["reward"][t, env] = step.action, reward
        segment["terminated"][t, env], segment["truncated"][t, env] = terminated, truncated
        segment["valid"][t, env] = True
        if terminated or truncated:
            segment["final_obs"][t, env] = step.next_obs
            self._resets[env] = self.next_step
            if not self.next_step:
                self._episode[env] += 1
                self._time[env] = 0
        segment["obs"][t + 1, env] = self._observed(env)


class MemoryConformance:
    """Inherit, override `make`, and run with pytest. Every call of `make` returns an equal, empty memory."""

    spec = SPEC
    num_actors = 2
    additions = 12  # a memory must be ready at least once within this many intakes

    def make(self) -> Memory:
        """Return a new memory for segments of `spec`."""
        raise NotImplementedError

    def test_an_empty_memory_wants_data(self) -> None:
        memory = self.make()
        assert memory.wants_data()
        assert not memory.ready()

    def test_adding_no_segments_changes_nothing(self) -> None:
        memory = self.make()
        memory.add([])
        assert memory.wants_data()
        assert not memory.ready()

    def test_never_stalls(self) -> None:
        """A learner that adds when `wants_data` and learns when `ready` always has work, and does both."""
        memory = self.make()
        batches = self._run(memory, self._rounds())
        assert batches, f"not ready after {self.additions} intakes"
        assert memory.wants_data(), "never hungry again: the learner would learn from the same for ever"

    def test_keeps_its_own_copy(self) -> None:
        """Released segments are overwritten by their writers."""
        for batch in self._run(self.make(), self._rounds(), spoil=True):
            self._require_consistent(batch)

    def test_meaningless_rows_stay_out(self) -> None:
        for next_step in (False, True):
            for batch in self._run(self.make(), self._rounds(next_step=next_step)):
                self._require_consistent(batch)

    def test_same_intake_same_batches(self) -> None:
        one, other = self._run(self.make(), self._rounds()), self._run(self.make(), self._rounds())
        _require_equal(one, other)

    def test_goes_on_exactly_from_its_state(self) -> None:
        """Also after serialization, into a memory that was used before, and while the original continues."""
        rounds = self._rounds()
        for split in range(1, self.additions, 3):
            original, copy = self.make(), self.make()
            self._run(original, rounds[:split])
            self._run(copy, rounds[: split // 2])
            state = original.state()
            after = self._run(original, rounds[split:])
            copy.restore(codec.unpack(codec.pack(state)))
            _require_equal(after, self._run(copy, rounds[split:]))
            assert copy.stats() == original.stats()

    def test_goes_on_exactly_from_its_live_state(self, tmp_path: Path) -> None:
        """Saves to disk like successive checkpoints; the restored memories continue like the original."""
        rounds, before = self._rounds(), None
        original = self.make()
        for split in range(1, self.additions, 3):
            self._run(original, rounds[max(0, split - 3) : split])
            rings: list[Ring] = []
            tree = codec.pack(row_chunks.extract_rings(original.live_state(), rings))
            write_bundle(tmp_path / str(split), {}, partial(row_chunks.write_rows, rings=rings, before=before))
            before = tmp_path / str(split)
            saved = row_chunks.read_rows(before, read_file(before, ROWS))
            copy, twin = self.make(), self.make()
            self._run(copy, rounds[: split // 2])
            for memory in (copy, twin):
                memory.restore(row_chunks.insert_rings(codec.unpack(tree), saved))
            _require_equal(self._run(twin, rounds[split:]), self._run(copy, rounds[split:]))
            assert copy.stats() == twin.stats()
        after = self._run(original, rounds[split:])
        last = self.make()
        last.restore(row_chunks.insert_rings(codec.unpack(tree), saved))
        _require_equal(after, self._run(last, rounds[split:]))

    def test_goes_on_exactly_between_add_and_learning(self) -> None:
        original, copy = self.make(), self.make()
        for segments in self._rounds():
            original.add(segments)
            if original.ready():
                break
        copy.restore(codec.unpack(codec.pack(original.state())))
        assert copy.ready()
        _require_equal([_copied(original.sample())], [_copied(copy.sample())])

    def test_stats_are_plain_numbers(self) -> None:
        memory = self.make()
        self._run(memory, self._rounds())
        assert all(isinstance(name, str) and isinstance(value, float) for name, value in memory.stats().items())

    def learned(self, batch: Batch) -> Learned:
        """Return an agent's result for a batch: priorities that depend only on the rows."""
        priorities = None if batch.indices is None else 0.1 + np.abs(np.asarray(batch["reward"], np.float64))
        return Learned(updates=1, priorities=priorities)

    def _rounds(self, *, next_step: bool = True) -> list[list[Segment]]:
        actors = [ScriptedActor(self.spec, actor, next_step=next_step) for actor in range(self.num_actors)]
        return [[actor.segment(version) for actor in actors] for version in range(self.additions)]

    def _run(self, memory: Memory, rounds: Iterable[list[Segment]], *, spoil: bool = False) -> list[Batch]:
        """Do what a learner does in sync mode, at most a thousand updates per intake; return copies of the batches."""
        batches = []
        for segments in rounds:
            memory.add(segments)
            if spoil:
                for column in (column for segment in segments for column in segment.columns.values()):
                    column[...] = POISON if column.dtype.kind == "f" else 1
            for _ in range(1000):
                assert memory.ready() or memory.wants_data(), "neither ready nor hungry: the run would stand still"
                if not memory.ready():
                    break
                batch = memory.sample()
                batches.append(_copied(batch))
                memory.update(batch, self.learned(batch))
        return batches

    def _require_consistent(self, batch: Batch) -> None:
        """Check that rewards and observations are real, and that each next observation is from the same episode."""
        if "valid" in batch.columns:
            valid = batch["valid"]
            cut = (batch["terminated"] | batch["truncated"])[..., None]
            obs, following = batch["obs"][:-1], np.where(cut, batch["final_obs"], batch["obs"][1:])
            obs, following, reward = obs[valid], following[valid], batch["reward"][valid]
        else:
            obs, following, reward = batch["obs"], batch["next_obs"], batch["reward"]
        assert np.isfinite(obs).all()
        assert np.isfinite(reward).all()
        np.testing.assert_array_equal(obs[:, :3], following[:, :3])
        assert (following[:, 3] > obs[:, 3]).all()


def _copied(batch: Batch) -> Batch:
    columns = {name: column.copy() for name, column in batch.columns.items()}
    if "final_obs" in columns:  # meaningless elsewhere, and may differ
        columns["final_obs"][~(columns["terminated"] | columns["truncated"])] = 0
    return Batch(columns, _copy(batch.weights), _copy(batch.indices), batch.versions)


def _copy(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array.copy()


def _require_equal(batches: list[Batch], others: list[Batch]) -> None:
    assert len(batches) == len(others)
    for one, other in zip(batches, others, strict=True):
        assert one.columns.keys() == other.columns.keys()
        assert one.versions == other.versions
        pairs: list[tuple[Any, Any]] = [(one[name], other[name]) for name in one.columns]
        for left, expected_batch in [*pairs, (one.weights, other.weights), (one.indices, other.indices)]:
            np.testing.assert_array_equal(left, expected_batch)
