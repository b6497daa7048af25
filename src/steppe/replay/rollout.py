"""The memory of on-policy agents: joins received segments along B into one batch, which is learned from once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from steppe.core.contracts.algorithm import Learned, Tree
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import SegmentSpec


class RolloutBuffer:
    """Hold one batch from `add` until `update`; the next `add` reuses the batch's arrays."""

    def __init__(self, spec: SegmentSpec) -> None:
        self.spec = spec
        self._capacity = 0  # capacity of the buffers, in segments
        self._buffers: dict[str, np.ndarray] = {}
        self._batch: Batch | None = None
        self._rows = 0

    def add(self, segments: Sequence[Segment]) -> None:
        """Join segments in the given order into the next batch."""
        if not segments:
            return
        if self._batch is not None:
            raise UsageError("a rollout takes new segments only after the last ones were learned from")
        for segment in segments:
            self._require(segment)
        columns = self._columns(len(segments))
        width = self.spec.num_envs
        for index, segment in enumerate(segments):
            columns_of_segment = slice(index * width, (index + 1) * width)
            for name, column in columns.items():
                if name != "final_obs":
                    column[:, columns_of_segment] = segment[name]
            cut = segment.cut  # final_obs is defined only at cuts: do not touch its other memory pages
            columns["final_obs"][:, columns_of_segment][cut] = segment["final_obs"][cut]
        versions = tuple(segment.header.version for segment in segments if segment.header is not None)
        self._set_batch(Batch(columns, versions=versions))

    def wants_data(self) -> bool:
        return not self.ready()

    def ready(self) -> bool:
        return self._batch is not None

    def sample(self) -> Batch:
        """Return the whole batch; repeated calls return the same one until `update`."""
        if self._batch is None:
            raise UsageError("there is no rollout to learn from: add segments first")
        return self._batch

    def update(self, batch: Batch, learned: Learned) -> None:
        """Discard the batch."""
        self._batch = None

    def stats(self) -> dict[str, float]:
        """Return the number of steps in the newest batch, without autoreset steps."""
        return {"size": float(self._rows)}

    def state(self) -> Tree:
        if self._batch is None:
            return {"rows": self._rows}
        columns = {name: column.copy() for name, column in self._batch.columns.items()}
        return {"rows": self._rows, "columns": columns, "versions": list(self._batch.versions)}

    def live_state(self) -> Tree:
        return self.state()

    def restore(self, state: Tree) -> None:
        self._batch, self._rows = None, state["rows"]
        if "columns" in state:
            columns = self._columns(len(state["versions"]))
            for name, column in columns.items():
                column[...] = state["columns"][name]
            self._set_batch(Batch(columns, versions=tuple(state["versions"])))

    def _set_batch(self, batch: Batch) -> None:
        self._batch = batch
        self._rows = int(np.count_nonzero(batch["valid"]))

    def _columns(self, count: int) -> dict[str, np.ndarray]:
        """Return contiguous `[T, B · count, …]` columns over buffers that only grow."""
        shapes = {}
        for field in self.spec.fields:
            num_steps, num_envs, *rest = self.spec.shape(field)
            shapes[field.name] = (num_steps, num_envs * count, *rest)
        if count > self._capacity:
            self._buffers = {f.name: np.zeros(math.prod(shapes[f.name]), f.dtype) for f in self.spec.fields}
            self._capacity = count
        return {name: self._buffers[name][: math.prod(shape)].reshape(shape) for name, shape in shapes.items()}

    def _require(self, segment: Segment) -> None:
        if segment.header is None:
            raise UsageError("a segment without a header cannot be remembered: its version is unknown")
        if segment.spec != self.spec:
            raise UsageError(f"a segment of {segment.spec} does not fit a rollout of {self.spec}")
