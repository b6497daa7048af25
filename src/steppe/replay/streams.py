"""Segments become pieces for sequence replay: the steps of one environment in order, cut where its episode is.

Sequences begin every `stride` steps of an episode, wherever an actor's life is divided into segments or an episode into
pieces. A long episode is stored piece by piece; the next piece repeats what its first sequence needs for its burn-in.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from steppe.core.agent import Tree
from steppe.core.errors import UsageError
from steppe.core.experience import Segment
from steppe.core.specs import SegmentSpec
from steppe.replay.sequences import Windowing

Piece = tuple[dict[str, np.ndarray], np.ndarray, bool]  # rows, which of them are starts, whether its episode ended
LEAST_ROWS = 256  # steps after which an open piece is stored, though its episode goes on


class Stream:
    """The open piece of one environment."""

    def __init__(self, columns: dict[str, np.ndarray], rules: Windowing) -> None:
        self.columns = columns  # room for rows
        self.rules = rules
        self.count = 0  # steps in it
        self.next_start = 0  # the row of the first sequence that was not stored yet

    def append(self, rows: dict[str, np.ndarray]) -> None:
        """Take over steps; there must be room."""
        count = len(rows["reward"])
        for name, column in self.columns.items():
            column[self.count : self.count + count] = rows[name]
        self.count += count

    def end(self, last_obs: np.ndarray) -> Iterator[Piece]:
        """Close the piece with what was seen last; its episode never goes on."""
        if self.count > self.next_start:
            for name, column in self.columns.items():
                column[self.count] = last_obs if name == "obs" else np.zeros((), column.dtype)
            starts = np.arange(self.next_start, self.count, self.rules.step)
            yield {name: column[: self.count + 1].copy() for name, column in self.columns.items()}, starts, True
        self.count = self.next_start = 0

    def flush(self) -> Iterator[Piece]:
        """Store the sequences that are complete, keeping what the next ones need."""
        rules = self.rules
        complete = self.count - rules.length - rules.n_step  # the last row at which a complete sequence may begin
        starts = np.arange(self.next_start, complete + 1, rules.step)
        if not len(starts):
            return
        yield {name: column[: self.count].copy() for name, column in self.columns.items()}, starts, False
        following = int(starts[-1]) + rules.step
        first = max(0, following - rules.burn_in)
        for column in self.columns.values():
            column[: self.count - first] = column[first : self.count].copy()
        self.count, self.next_start = self.count - first, following - first


class Streams:
    """The open pieces of all environments of all actors."""

    def __init__(self, spec: SegmentSpec, rules: Windowing) -> None:
        self.spec, self.rules = spec, rules
        self.limit = max(LEAST_ROWS, 4 * rules.rows)
        self._names = [f.name for f in spec.fields if f.name not in ("final_obs", "truncated", "valid")]
        self._streams: dict[int, list[Stream]] = {}
        self._seen: dict[int, tuple[int, np.ndarray]] = {}  # by actor: its last segment's number, what it saw last

    def pieces(self, segment: Segment) -> Iterator[Piece]:
        """The pieces that a segment completes."""
        if segment.header is None:
            raise UsageError("a segment without a header cannot be remembered: who collected it is unknown")
        actor, number = segment.header.actor, segment.header.sequence
        streams = self._streams.setdefault(actor, [])
        if not streams:
            streams += [self._stream() for _ in range(self.spec.num_envs)]
        elif not self._continues(segment):
            for env, stream in enumerate(streams):
                yield from stream.end(self._seen[actor][1][env])
        for env, stream in enumerate(streams):
            yield from self._take(stream, segment, env)
        self._seen[actor] = number, segment["obs"][self.spec.num_steps].copy()

    def _take(self, stream: Stream, segment: Segment, env: int) -> Iterator[Piece]:
        """Append one environment's steps, up to each cut, in portions that there is room for."""
        valid, cut = segment["valid"][:, env], segment.cut[:, env]
        t, num_steps = 0, self.spec.num_steps
        while t < num_steps:
            if not valid[t]:
                t += 1
                continue
            until = t + 1
            while until < num_steps and valid[until] and not cut[until - 1] and stream.count + until - t < self.limit:
                until += 1
            stream.append({name: segment[name][t:until, env] for name in self._names})
            if cut[until - 1]:
                yield from stream.end(segment["final_obs"][until - 1, env])
            elif stream.count >= self.limit:
                yield from stream.flush()
            t = until

    def _continues(self, segment: Segment) -> bool:
        assert segment.header is not None
        number, seen = self._seen[segment.header.actor]
        return segment.header.sequence == number + 1 and np.array_equal(segment["obs"][0], seen)

    def _stream(self) -> Stream:
        fields = {f.name: f for f in self.spec.fields if f.name in self._names}
        rows = {name: np.zeros((self.limit + 1, *f.shape), f.dtype) for name, f in fields.items()}
        return Stream(rows, self.rules)

    def state(self) -> Tree:
        """What is open."""
        return {
            str(actor): {
                "sequence": self._seen[actor][0],
                "last_obs": self._seen[actor][1].copy(),
                "next_starts": [stream.next_start for stream in streams],
                "open": [{n: c[: stream.count].copy() for n, c in stream.columns.items()} for stream in streams],
            }
            for actor, streams in self._streams.items()
        }

    def restore(self, state: Tree) -> None:
        """Take over what `state` returned."""
        self._streams, self._seen = {}, {}
        for actor, saved in state.items():
            self._seen[int(actor)] = int(saved["sequence"]), np.array(saved["last_obs"])
            streams = self._streams[int(actor)] = [self._stream() for _ in range(self.spec.num_envs)]
            for stream, rows, start in zip(streams, saved["open"], saved["next_starts"], strict=True):
                stream.append(rows)
                stream.next_start = int(start)
