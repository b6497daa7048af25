"""Split segments into episode fragments for sequence replay: consecutive steps of one environment within one episode.

A fragment holds the steps of all agents of its environment. Sequences start every `stride` steps of an episode,
independent of segment and fragment boundaries. A long episode is stored in several fragments; each repeats the rows
that its first sequence needs for burn-in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import COLUMNS_WITH_BOOTSTRAP_ROW, SegmentSpec
from steppe.replay.sequence_windows import POSITION_FIELDS, Windowing, step_fields

# Columns, rows at which sequences start, whether the episode ended.
EpisodeFragment = tuple[dict[str, np.ndarray], np.ndarray, bool]
LastStep = dict[str, np.ndarray]  # by column, for all environments
MIN_FLUSH_STEPS = 256  # an open fragment is stored after at least this many steps, although its episode continues


class FragmentBuilder:
    """The open fragment of one environment."""

    def __init__(self, columns: dict[str, np.ndarray], rules: Windowing) -> None:
        self.columns = columns  # preallocated rows
        self.rules = rules
        self.count = 0  # rows in use
        self.next_start = 0  # start row of the first sequence that is not stored yet

    def append(self, rows: dict[str, np.ndarray]) -> None:
        """Append steps; the caller ensures that they fit."""
        count = len(rows["reward"])
        for name, column in self.columns.items():
            column[self.count : self.count + count] = rows[name]
        self.count += count

    def end(self, last: Mapping[str, np.ndarray]) -> Iterator[EpisodeFragment]:
        """Close the fragment with its last observation; its episode does not continue."""
        if self.count > self.next_start:
            for name, column in self.columns.items():
                column[self.count] = last.get(name, 0)
            starts = np.arange(self.next_start, self.count, self.rules.step)
            yield {name: column[: self.count + 1].copy() for name, column in self.columns.items()}, starts, True
        self.count = self.next_start = 0

    def flush(self) -> Iterator[EpisodeFragment]:
        """Yield a fragment with the complete sequences, and keep the rows that the next ones need."""
        rules = self.rules
        complete = self.count - rules.length - rules.n_step  # last possible start of a complete sequence
        starts = np.arange(self.next_start, complete + 1, rules.step)
        if not len(starts):
            return
        yield {name: column[: self.count].copy() for name, column in self.columns.items()}, starts, False
        following = int(starts[-1]) + rules.step
        first = max(0, following - rules.burn_in)
        for column in self.columns.values():
            column[: self.count - first] = column[first : self.count].copy()
        self.count, self.next_start = self.count - first, following - first


class SegmentSplitter:
    """Split the segments of all actors; holds the open fragments of all their environments."""

    def __init__(self, spec: SegmentSpec, rules: Windowing) -> None:
        self.spec, self.rules = spec, rules
        self.limit = max(MIN_FLUSH_STEPS, 4 * rules.rows)
        self._fields = [f for f in step_fields(spec) if f not in POSITION_FIELDS]
        self._streams: dict[int, list[FragmentBuilder]] = {}
        self._last_steps: dict[int, tuple[int, LastStep]] = {}  # by actor: last sequence number, last step

    def split(self, segment: Segment) -> Iterator[EpisodeFragment]:
        """Yield the fragments that a segment completes."""
        if segment.header is None:
            raise UsageError("a segment without a header cannot be remembered: who collected it is unknown")
        actor, number = segment.header.actor, segment.header.sequence
        streams = self._streams.setdefault(actor, [])
        if not streams:
            streams += self._new_streams()
        elif not self._continues(segment):
            for env, stream in enumerate(streams):
                yield from stream.end(_select_env(self._last_steps[actor][1], env))
        columns = group_by_env(segment)
        for env, stream in enumerate(streams):
            yield from self._add_steps(stream, columns, env)
        last = {name: columns[name][-1].copy() for name in COLUMNS_WITH_BOOTSTRAP_ROW if name in columns}
        if "live" in columns:
            last["live"] = columns["live"][-1] & ~columns["truncated"][-1] & ~columns["terminated"][-1]
        self._last_steps[actor] = number, last

    def _add_steps(
        self, stream: FragmentBuilder, columns: Mapping[str, np.ndarray], env: int
    ) -> Iterator[EpisodeFragment]:
        """Append one environment's steps, split at episode ends and at the capacity of the open fragment."""
        valid, ended = columns["present"][:, env], columns["ended"][:, env]
        t, num_steps = 0, self.spec.num_steps
        while t < num_steps:
            if not valid[t]:
                t += 1
                continue
            until = t + 1
            while until < num_steps and valid[until] and not ended[until - 1] and stream.count + until - t < self.limit:
                until += 1
            stream.append({f.name: columns[f.name][t:until, env] for f in self._fields})
            if ended[until - 1]:
                finals = {"obs": "final_obs", "comm_mask": "final_comm_mask", "live": "live"}
                yield from stream.end({to: columns[of][until - 1, env] for to, of in finals.items() if of in columns})
            elif stream.count >= self.limit:
                yield from stream.flush()
            t = until

    def _continues(self, segment: Segment) -> bool:
        assert segment.header is not None
        number, last_step = self._last_steps[segment.header.actor]
        return segment.header.sequence == number + 1 and np.array_equal(
            segment["obs"][0].reshape(last_step["obs"].shape), last_step["obs"]
        )

    def _new_streams(self) -> list[FragmentBuilder]:
        """Return an empty builder for each environment of an actor."""
        rows = [
            {f.name: np.zeros((self.limit + 1, *f.shape), f.dtype) for f in self._fields} for _ in self._environments
        ]
        return [FragmentBuilder(columns, self.rules) for columns in rows]

    @property
    def _environments(self) -> range:
        return range(self.spec.num_envs // self.spec.num_agents)

    def state(self) -> Tree:
        """Return the open fragments."""
        return {
            str(actor): {
                "sequence": self._last_steps[actor][0],
                "last": {name: column.copy() for name, column in self._last_steps[actor][1].items()},
                "next_starts": [stream.next_start for stream in streams],
                "open": [{n: c[: stream.count].copy() for n, c in stream.columns.items()} for stream in streams],
            }
            for actor, streams in self._streams.items()
        }

    def restore(self, state: Tree) -> None:
        """Restore what `state` returned."""
        self._streams, self._last_steps = {}, {}
        for actor, saved in state.items():
            last = {name: np.array(column) for name, column in saved["last"].items()}
            self._last_steps[int(actor)] = int(saved["sequence"]), last
            streams = self._streams[int(actor)] = self._new_streams()
            for stream, rows, start in zip(streams, saved["open"], saved["next_starts"], strict=True):
                stream.append(rows)
                stream.next_start = int(start)


def group_by_env(segment: Segment) -> dict[str, np.ndarray]:
    """Return a segment's columns as [T, environments, …], followed by an agent axis if there are several agents.

    Adds `there` and `ended`, [T, environments]: whether a step was taken and whether an episode ended. With several
    agents, adds `live`, which marks the agents that are present; an absent agent has reward 0 and is never terminated.
    """
    agents, columns = segment.spec.num_agents, segment.columns
    if agents == 1:
        return {**columns, "present": columns["valid"], "ended": segment.ended}
    grouped = {name: column.reshape(len(column), -1, agents, *column.shape[2:]) for name, column in columns.items()}
    live = grouped["valid"]
    grouped["reward"] = np.where(live, grouped["reward"], np.float32(0))
    grouped["terminated"] = grouped["terminated"] & live
    return {**grouped, "live": live, "present": np.any(live, axis=2), "ended": segment.ended}


def _select_env(last: LastStep, env: int) -> LastStep:
    return {name: column[env] for name, column in last.items()}
