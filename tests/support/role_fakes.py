"""Scripted stand-ins for worlds, policies, agents, memories and clocks, whose every number is known beforehand."""

from __future__ import annotations

import numpy as np

from steppe.core.contracts.algorithm import Learned
from steppe.core.contracts.errors import EnvironmentFault
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec, SegmentSpec
from steppe.core.contracts.weights import Weights
from steppe.roles.context import RUN, Context
from steppe.transport.local import LocalBoard, LocalChannel, LocalWeights

ENV = EnvSpec("scripted", FieldSpec("obs", (2,), "float32"), ActionSpec("discrete", (100,)))
SPEC = SegmentSpec(3, 2, ENV.obs, ENV.action.field, (FieldSpec("logp", (), "float32"),))


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def make_context(
    name: str = "role", *, num_actors: int = 1, slots: int = 1, spec: SegmentSpec = SPEC, **links
) -> Context:
    """A context over local links; `context.orders` is what the role is asked to do."""
    orders = {"now": RUN}
    given = {
        "channel": LocalChannel(spec, num_actors, slots),
        "weights": LocalWeights(),
        "board": LocalBoard(),
        "clock": FakeClock(),
        **links,
    }
    context = Context("run", name, requested=lambda: orders["now"], **given)
    context.orders = orders
    return context


def weights_of(version: int, *, env_steps: int = 0, episodes: int = 0, value: float = 0.0) -> Weights:
    made = Weights.from_arrays({"w": np.full(3, value, np.float32)})
    return made.stamped(version=version, updates=version, env_steps=env_steps, episodes=episodes, train_s=version / 2)


def segment_of(channel, actor: int, sequence: int, version: int = 0, *, started_s: float = 0.0, spec=SPEC) -> Segment:
    """Offer a segment of nothing but valid rows that end no episode."""
    segment = channel.blank(actor)
    for column in segment.columns.values():
        column[...] = 0
    segment["valid"][...] = True
    segment.header = SegmentHeader("run", actor, 0, sequence, version, started_s)
    channel.offer(segment)
    return segment


class ScriptedWorld:
    """Environment b observes (b, steps since it began); its episodes have `lengths[b]` steps and pay their step's number.

    With `next_step`, a step after each end only resets, as in Gymnasium's NEXT_STEP mode.
    """

    def __init__(self, lengths=(4, 5), *, next_step: bool = False, fail_at: int | None = None) -> None:
        self.spec, self.num_envs = ENV, len(lengths)
        self.starts = np.ones(self.num_envs, bool)
        self.lengths, self.next_step, self.fail_at = lengths, next_step, fail_at
        self.seeds: list = []
        self.actions: list[np.ndarray] = []
        self.poison: dict[int, tuple[str, float]] = {}  # at the step so numbered, from 1: field and value
        self.closed = False
        self._elapsed = [0] * self.num_envs
        self._ended = [False] * self.num_envs
        self._finished: list[tuple[float, int]] = []

    def reset(self, obs, seeds=None) -> None:
        self.seeds.append(seeds)
        self._elapsed = [0] * self.num_envs
        self._ended = [False] * self.num_envs
        self.starts[:] = True
        obs[:, 0], obs[:, 1] = np.arange(self.num_envs), 0

    def step(self, actions, segment, t) -> None:
        self.actions.append(np.array(actions))
        if len(self.actions) == self.fail_at:
            raise EnvironmentFault("the script says so", {"step": self.fail_at})
        for env in range(self.num_envs):
            self._step(segment, t, env)
        field, value = self.poison.get(len(self.actions), (None, 0.0))
        if field is not None:
            segment[field][t + (field == "obs"), 1] = value

    def _step(self, segment, t, env) -> None:
        resets, self._ended[env] = self._ended[env], False
        self._elapsed[env] += not resets
        over = not resets and self._elapsed[env] == self.lengths[env]
        segment["valid"][t, env] = not resets
        segment["reward"][t, env] = 0 if resets else self._elapsed[env]
        segment["terminated"][t, env], segment["truncated"][t, env] = over and env % 2 == 0, over and env % 2 == 1
        self.starts[env] = resets or (over and not self.next_step)
        if over:
            segment["final_obs"][t, env] = env, self._elapsed[env]
            self._finished.append((float(sum(range(1, self._elapsed[env] + 1))), self._elapsed[env]))
            self._ended[env] = self.next_step
            elapsed = self._elapsed[env] if self.next_step else 0
            self._elapsed[env] = 0
            segment["obs"][t + 1, env] = env, elapsed
        else:
            segment["obs"][t + 1, env] = env, self._elapsed[env]

    def take_finished(self):
        taken, self._finished = self._finished, []
        return taken

    def unfinished(self):
        return [(float(sum(range(1, elapsed + 1))), elapsed) for elapsed in self._elapsed]

    def render(self):
        return np.full((2, 2, 3), self._elapsed[0], np.uint8)

    def snapshot(self):
        return {"elapsed": list(self._elapsed), "ended": list(self._ended), "starts": self.starts.copy()}

    def restore(self, state) -> None:
        self._elapsed, self._ended = list(state["elapsed"]), list(state["ended"])
        self.starts[:] = state["starts"]

    def close(self) -> None:
        self.closed = True


class ScriptedPolicy:
    """Action = 10 × version + time in the episode; logp = −version; counts what it was told."""

    def __init__(self) -> None:
        self.version = 0
        self.begun: list[tuple[int, float]] = []
        self.loaded: list[int] = []
        self.starts: list[np.ndarray] = []
        self.explored: list[bool] = []

    def begin(self, num_envs, stream, *, actor=0, num_actors=1) -> None:
        self.begun.append((num_envs, float(stream.random())))

    def act(self, obs, starts, *, explore=True):
        self.starts.append(starts.copy())
        self.explored.append(explore)
        action = 10 * self.version + obs[:, 1].astype(np.int64)
        return {"action": action, "logp": np.full(len(obs), -self.version, np.float32)}

    def acting_state(self):
        return {"version": self.version}

    def restore_acting(self, state) -> None:
        self.version = state["version"]

    def load(self, weights) -> None:
        self.version = weights.version
        self.loaded.append(weights.version)


class ScriptedAgent:
    """Its only weight counts the batches it learned from; each is one update unless told otherwise."""

    def __init__(self, updates_per_batch: int = 1) -> None:
        self.updates_per_batch = updates_per_batch
        self.learned: list[Batch] = []
        self.observed: list[tuple[int, int, int]] = []  # actor, sequence, env_steps of the progress
        self._weights = Weights.from_arrays({"w": np.zeros(1, np.float32)})

    def observe(self, segment, progress) -> None:
        self.observed.append((segment.header.actor, segment.header.sequence, progress.env_steps))

    def learn(self, batch) -> Learned:
        self.learned.append(batch)
        self._weights.arrays()["w"][:] += 1
        return Learned(self.updates_per_batch, {"loss": float(len(self.learned))})

    def weights(self) -> Weights:
        return self._weights

    def load(self, weights) -> None:
        self._weights.buffer[:] = weights.buffer

    def state(self):
        return {"learned": len(self.learned)}

    def restore(self, state) -> None:
        self.learned = [None] * state["learned"]


class ScriptedMemory:
    """Ready for `batches` batches after each intake from the `warm_up`-th on."""

    def __init__(self, batches: int = 1, warm_up: int = 1) -> None:
        self.batches, self.warm_up = batches, warm_up
        self.intakes: list[list[tuple[int, int]]] = []
        self.updated: list[Learned] = []
        self._left = 0

    def add(self, segments) -> None:
        self.intakes.append([(segment.header.actor, segment.header.sequence) for segment in segments])
        if len(self.intakes) >= self.warm_up:
            self._left = self.batches

    def wants_data(self) -> bool:
        return self._left == 0

    def ready(self) -> bool:
        return self._left > 0

    def sample(self) -> Batch:
        return Batch({"left": np.array([self._left])})

    def update(self, batch, learned) -> None:
        self.updated.append(learned)
        self._left -= 1

    def stats(self):
        return {"size": float(len(self.intakes))}

    def state(self):
        return {"intakes": len(self.intakes), "left": self._left}

    def live_state(self):
        return self.state()

    def restore(self, state) -> None:
        self._left = state["left"]
