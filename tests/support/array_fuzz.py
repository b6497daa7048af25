"""Feeds every public entry arbitrary arrays, in a process of its own: `python array_fuzz.py NAME EXAMPLES`.

An entry answers or raises SteppeError. Whatever else it raises is printed, and the process ends with 1; a process that
ended by a signal died in compiled code.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from steppe import EnvSpec, FieldSpec
from steppe.core.contracts.errors import SteppeError
from steppe.core.contracts.specs import ActionSpec, SegmentSpec

Call = Callable[[], object]
Entry = Callable[[st.DataObject], Iterator[Call]]
ROWS, STATES, ACTIONS, AGENTS = 4, 5, 3, 2
SPEC = EnvSpec("fuzz", FieldSpec("obs", (2,), "float32"), ActionSpec("discrete", (ACTIONS,)))
TABLE = EnvSpec("fuzz", FieldSpec("obs", (), "int64"), ActionSpec("discrete", (ACTIONS,)), num_states=STATES)
TEAM = EnvSpec("fuzz", FieldSpec("obs", (6, 9, 9), "float32"), ActionSpec("discrete", (ACTIONS,)), num_agents=AGENTS)
DTYPES = ["?", "i1", "u1", "i4", "i8", "u8", "f2", "f4", "f8", ">f4", ">i8", "c8", "U2", "O"]
NUMBERS = st.sampled_from(
    [0, 1, 2, 3, -1, -5, 7, 10**8, -(2**63), 2**63 - 1, 10**30, 0.5, 1e300, float("nan"), float("inf")]
)


def near(*shapes: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """One of the shapes that fit, most of the time."""
    fitting = st.sampled_from(shapes)
    return st.one_of(fitting, fitting, fitting, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))


def arrays(*shapes: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Arrays of any dtype and layout; shapes are near those that fit."""
    return st.builds(
        _array, near(*shapes), st.sampled_from(DTYPES), st.lists(NUMBERS, min_size=1, max_size=4), st.integers(0, 4)
    )


def _array(shape: tuple[int, ...], dtype: str, numbers: list[Any], layout: int) -> Any:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        values = np.resize(np.array(numbers, object), shape) if np.prod(shape) else np.empty(shape, object)
        try:
            made = values.astype(dtype)
        except (OverflowError, ValueError, TypeError):
            made = np.resize(np.array([0, 2], dtype), shape)
    if layout == 1 and made.ndim:
        return np.repeat(made, 2, axis=0)[::2]
    if layout == 2:
        made.flags.writeable = False
    elif layout == 3 and made.dtype == np.bool_:
        made.view(np.uint8).fill(2)
    elif layout == 4:
        return made.tolist()
    return made


def sound(spec: EnvSpec) -> dict[str, Any]:
    """Flat transitions that every agent here can learn from."""
    seen = np.arange(ROWS) if spec.num_states else np.linspace(0, 1, 2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
    real, flags = np.zeros(ROWS, np.float32), np.zeros(ROWS, bool)
    return {
        "obs": seen, "action": np.arange(ROWS) % ACTIONS, "reward": real, "next_obs": seen, "terminated": flags,
        "truncated": flags, "logp": real - 1, "value": real, "mask": np.ones((ROWS, ACTIONS), bool),
    }  # fmt: skip


def spoiled(data: st.DataObject, batch: dict[str, Any], *more: str) -> dict[str, Any]:
    """A batch in which one or two columns are arbitrary."""
    names = data.draw(st.lists(st.sampled_from([*batch, *more]), min_size=1, max_size=2, unique=True))
    return batch | {name: data.draw(arrays((ROWS,), (ROWS, 2), np.shape(batch.get(name, 0)))) for name in names}


def composition() -> Entry:
    from steppe import DistributedAgent

    kinds = {name: DistributedAgent(name) for name in ("dqn", "ppo", "q-learning")}
    made = {name: agent.bind(TABLE if name == "q-learning" else SPEC) for name, agent in kinds.items()}

    def calls(data: st.DataObject) -> Iterator[Call]:
        name = data.draw(st.sampled_from(sorted(made)))
        agent, spec = made[name], TABLE if name == "q-learning" else SPEC
        batch = spoiled(data, sound(spec), "weights", "indices", "discount", "episode")
        rollout = {key: np.asarray(value)[:, None] for key, value in sound(spec).items()}
        last = {key: np.concatenate([rollout[key], rollout[key][:1]]) for key in ("obs", "mask")}
        rollout |= last | {"final_obs": rollout["next_obs"], "valid": np.ones((ROWS, 1), bool)}
        rolled = spoiled(data, rollout)
        yield lambda: agent.learn_from_batch(batch)
        yield lambda: agent.learn_from_batch(rolled)
        yield lambda: agent.compute_gradients(batch)
        known = agent.get_policy_parameters()
        key = data.draw(st.sampled_from(sorted(known)))
        values = known | {key: data.draw(arrays(known[key].shape, (1,)))}
        yield lambda: agent.set_policy_parameters(values)
        yield lambda: agent.apply_gradients(values)
        steps = [{column: np.asarray(value)[row] for column, value in sound(spec).items()} for row in range(ROWS)]
        steps[1] |= {"action": data.draw(arrays(())), "obs": data.draw(arrays((2,), ()))}
        yield lambda: agent.update_policy(steps)
        yield lambda: agent.update_policy([bad_columns(data, step) for step in steps])

    return calls


def played(spec: EnvSpec, extras: tuple[FieldSpec, ...]) -> dict[str, Any]:
    """An episode of ROWS steps, of one agent or of a team, that every agent with a memory can learn from."""
    team, rows = () if spec.num_agents == 1 else (spec.num_agents,), ROWS + 1
    hidden = next((field.shape for field in extras if field.name == "hidden"), (2,))
    heard = next((field.shape for field in extras if field.name == "comm_mask"), (1,))
    return {
        "obs": np.zeros((rows, *team, *spec.obs.shape), np.float32), "action": np.zeros((rows, *team), np.int64),
        "reward": np.zeros((rows, *team), np.float32), "terminated": np.zeros((rows, *team), bool),
        "hidden": np.zeros((rows, *team, *hidden), np.float32), "comm_mask": np.ones((rows, *team, *heard), bool),
        "q_val": np.zeros((rows, *team, ACTIONS), np.float32),
    }  # fmt: skip


def bad_columns(data: st.DataObject, columns: dict[str, Any], *more: str) -> dict[str, Any]:
    """Columns of which one or two are arbitrary, most of the time in a shape that another one has."""
    names = data.draw(st.lists(st.sampled_from([*columns, *more]), min_size=1, max_size=2, unique=True))
    shapes = sorted({np.shape(column) for column in columns.values()})
    return columns | {name: data.draw(arrays(np.shape(columns.get(name, 0)), *shapes)) for name in names}


def episodes() -> Entry:
    """Episodes of one agent and of a team: gathered step by step, kept, drawn as windows, learned from."""
    from steppe import DistributedAgent
    from steppe.replay import GlobalBuffer, LocalBuffer, Windowing

    configs = {"r2d2": {"cell_size": 4, "hidden": (4,)}, "dhc": {"channels": 8}}
    worlds = {"r2d2": SPEC, "dhc": TEAM}
    made = {name: DistributedAgent(name, config=config).bind(worlds[name]) for name, config in configs.items()}
    rules = Windowing(length=3, burn_in=1, n_step=2)

    def filled(episode: dict[str, Any]) -> GlobalBuffer:
        buffer = GlobalBuffer(40, rules, batch_size=2, seed=0)
        buffer.add(episode)
        return buffer

    def calls(data: st.DataObject) -> Iterator[Call]:
        name = data.draw(st.sampled_from(sorted(made)))
        agent, spec = made[name], worlds[name]
        good = played(spec, agent.config.columns(spec))
        bad = bad_columns(data, good, "live", "before", "lesson")
        buffer, fresh = filled(good), GlobalBuffer(40, rules, batch_size=2, seed=0)
        for kept in (buffer, fresh):
            yield lambda kept=kept: kept.add(bad)
            yield lambda kept=kept: kept.add({key: bad[key] for key in list(bad)[1:]})
            yield lambda kept=kept: agent.learn_from_batch(kept.get_batch())
        yield lambda: buffer.get_batch(data.draw(st.one_of(NUMBERS, arrays(()))))
        numbers, more = data.draw(arrays((2,))), data.draw(arrays((2,)))
        yield lambda: buffer.update_priorities(numbers, more)
        yield lambda: buffer.update_priorities(buffer.get_batch().indices, more)
        yield lambda: buffer.get_data()
        names = {key: "next_obs" if key == "obs" else key for key in good if key != "terminated"}
        steps = [{name: good[key][row] for key, name in names.items()} for row in range(ROWS)]
        steps[data.draw(st.integers(0, ROWS - 1))] |= bad_columns(data, steps[0])

        def gather(first: Any) -> None:
            local = LocalBuffer(first)
            for step in steps:
                local.add(**step)
            buffer.add(local.finish(terminated=data.draw(st.booleans())))
            agent.learn_from_batch(buffer.get_batch())

        yield lambda: gather(good["obs"][0])
        yield lambda: gather(data.draw(arrays(good["obs"][0].shape, ())))
        batch = filled(good).get_batch()
        windows = bad_columns(data, {**batch.columns, "weights": batch.weights, "indices": batch.indices}, "live")
        yield lambda: agent.learn_from_batch(windows)
        yield lambda: agent.compute_gradients(windows)

    return calls


def replay() -> Entry:
    from steppe import ExperienceBuffer, PrioritizedReplayBuffer, ReplayBuffer, ReplayBufferPool

    keys = ("obs", "action", "reward", "next_obs", "terminated")

    def calls(data: st.DataObject) -> Iterator[Call]:
        batch = {key: value for key, value in sound(SPEC).items() if key in keys}
        uniform, by_priority = ReplayBuffer(8, keys), PrioritizedReplayBuffer(8, keys)
        pool = ReplayBufferPool(2, 8, keys, use_prioritized=True)
        numbers, more, bad = data.draw(arrays((ROWS,))), data.draw(arrays((ROWS,))), spoiled(data, batch)
        for buffer in (uniform, by_priority):
            buffer.add_batch(batch)
            yield lambda buffer=buffer: buffer.add_batch(bad)
            yield lambda buffer=buffer: buffer.sample(2)
        yield lambda: by_priority.add_batch(batch, numbers)
        yield lambda: by_priority.update_priorities(numbers, more)
        yield lambda: by_priority.update_priorities(np.arange(ROWS), more)
        pool.add_experiences(batch)
        yield lambda: pool.add_experiences(bad)
        yield lambda: pool.add_experiences(batch, priorities=numbers)
        yield lambda: pool.update_priorities(numbers, more)
        yield lambda: pool.sample_batch(ROWS)
        yield lambda: pool.sample_batch(2, data.draw(NUMBERS))
        yield lambda: pool.add_experiences(batch, data.draw(st.one_of(NUMBERS, arrays(()))))
        yield lambda: pool.balance_buffers()
        yield lambda: pool.get_buffer_stats()
        one = {key: column[0] if np.shape(column)[:1] > (0,) else column for key, column in bad.items()}
        for buffer in (uniform, by_priority, *pool.buffers):
            yield lambda buffer=buffer: buffer.add(one)
            yield lambda buffer=buffer: buffer.sample(data.draw(st.one_of(NUMBERS, arrays(()))))
        yield lambda: by_priority.add(one, data.draw(st.one_of(NUMBERS, arrays(()))))
        yield lambda: pool.buffers[1].update_priorities(numbers, more)
        steps = ExperienceBuffer(4)
        yield lambda: steps.push(numbers, more, 0.0, numbers, False)
        yield lambda: steps.push(numbers, more, data.draw(st.one_of(NUMBERS, arrays(()))), numbers, False)
        yield lambda: steps.sample(1)
        yield lambda: steps.buffer[:]

    return calls


def classic() -> Entry:
    from steppe.classic import SARSA, DoubleQLearning, NStepQLearning, OptimalQLearning, QLambda, vectorized_q_update

    def calls(data: st.DataObject) -> Iterator[Call]:
        kind = data.draw(st.sampled_from([OptimalQLearning, SARSA, DoubleQLearning, NStepQLearning, QLambda]))
        agent, table = kind(STATES, ACTIONS, seed=1), np.zeros((STATES, ACTIONS), np.float32)
        good = [np.arange(ROWS), np.arange(ROWS) % ACTIONS, np.zeros(ROWS), np.arange(ROWS), np.zeros(ROWS, bool)]
        bad = [data.draw(arrays((ROWS,))) if data.draw(st.booleans()) else column for column in good]
        masks, states = data.draw(arrays((ROWS, ACTIONS), (ACTIONS,))), data.draw(arrays((ROWS,), ()))
        more = {"next_actions": data.draw(arrays((ROWS,)))} if kind is SARSA else {"next_masks": masks}
        if kind in (NStepQLearning, QLambda):
            more |= {"streams": data.draw(arrays((ROWS,))), "truncated": data.draw(arrays((ROWS,)))}
        row = [data.draw(st.one_of(NUMBERS, arrays(()))) for _ in range(5)]
        yield lambda: agent.learn(*bad, **more)
        yield lambda: agent.batch_update(
            dict(zip(("state", "action", "reward", "next_state", "done"), bad, strict=True))
        )
        yield lambda: agent.batch_update([tuple(row)])
        yield lambda: agent.update(*row)
        yield lambda: agent.update(1, 1, 0.0, 1, False, masks)
        yield lambda: agent.select_action(states, masks)
        yield lambda: agent.select_actions(states, masks)
        yield lambda: vectorized_q_update(table, *bad, 0.1, 0.9)
        yield lambda: vectorized_q_update(states, *good, 0.1, 0.9)

    return calls


def params() -> Entry:
    from steppe import ParameterServer
    from steppe.params.aggregation import METHODS, Aggregation

    server = ParameterServer({"w": np.zeros((2, 3), np.float32), "b": np.zeros(3)}, update_frequency=2)
    server.register_worker("one")

    def calls(data: st.DataObject) -> Iterator[Call]:
        gradient, row = data.draw(arrays((2, 3), (3,))), data.draw(arrays((9,), (8,)))
        weight = data.draw(st.floats())
        yield lambda: server.push_gradients("one", {"w": gradient, "b": np.zeros(3)}, weight)
        yield lambda: server.push_gradients("one", {"w": np.zeros((2, 3), np.float32)}, 1.0)
        yield lambda: server.push_row("one", row)
        yield lambda: server.aggregate_gradients()
        yield lambda: server.update_parameters()
        updates, weights = data.draw(arrays((3, 2), (4, 1))), data.draw(arrays((3,), (4,)))
        method = Aggregation(data.draw(st.sampled_from(sorted(METHODS))))
        yield lambda: method.combine(updates, weights)
        yield lambda: ParameterServer({"w": updates})

    return calls


def federated() -> Entry:
    """Servers of deltas and of whole parameters, in rounds of one worker."""
    from steppe import FederatedParameterServer

    start = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3)}
    made = {kind: FederatedParameterServer(start, 1, updates=kind) for kind in ("deltas", "parameters")}
    for server in made.values():
        server.register_worker("one")

    def calls(data: st.DataObject) -> Iterator[Call]:
        server = made[data.draw(st.sampled_from(sorted(made)))]
        update = {"w": data.draw(arrays((2, 3), (3,))), "b": data.draw(arrays((3,)))}
        row = data.draw(arrays((9,), (8,)))
        yield lambda: server.validate_worker_update("one", update)
        yield lambda: server.push_gradients("one", update)
        yield lambda: server.push_row("one", row)
        yield lambda: server.federated_averaging({"one": update, "two": dict(start)})
        yield lambda: server.federated_averaging({"one": row})
        yield lambda: server.get_parameters("one")
        yield lambda: FederatedParameterServer(update, 1)

    return calls


def client() -> Entry:
    """Clients of servers behind both transports, each server in this process."""
    from steppe import FederatedParameterServer, ParameterClient, ParameterServer

    start = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3)}
    servers = {"shm": ParameterServer(start, update_frequency=2), "grpc": FederatedParameterServer(start, 1)}
    urls = {
        "shm": servers["shm"].share(),
        "grpc": f"grpc://localhost:{servers['grpc'].start_server('localhost', 0)}",
    }
    clients = {name: ParameterClient(url, retry_s=0.0) for name, url in urls.items()}
    for one in clients.values():
        one.register_worker("one")

    def calls(data: st.DataObject) -> Iterator[Call]:
        one = clients[data.draw(st.sampled_from(sorted(clients)))]
        update = {"w": data.draw(arrays((2, 3), (3,))), "b": data.draw(arrays((3,)))}
        row, numbers = data.draw(arrays((9,), (8,))), data.draw(arrays((2,), (9,)))
        weight, version = data.draw(st.floats()), data.draw(NUMBERS)
        yield lambda: one.push_gradients("one", update, weight)
        yield lambda: one.push_row("one", row)
        yield lambda: one.push_row("one", row, weight, round_number=version, version=version)
        yield lambda: one.push_gradients("one", update, round_number=version, version=version)
        yield lambda: one.tally("one", version, numbers)
        yield lambda: one.report("one", {"loss": data.draw(NUMBERS), "more": numbers})
        yield lambda: one.pull_newer("one", version)
        yield lambda: one.newer_than("policy", version)
        yield lambda: one.push_row("one", np.zeros(9, np.float32)) or one.pull("one")
        assert one.is_serving(), "a server that answers nobody any more"

    return calls


def environment() -> Entry:
    """Parameters given to the workers of an environment, which act with them."""
    from steppe import DistributedAgent, DistributedEnvironment

    world = DistributedEnvironment("steppe/Identity-v0", 1, runtime="inline")
    agents = [DistributedAgent(name, seed=0).bind(world) for name in ("dqn", "ppo")]

    def calls(data: st.DataObject) -> Iterator[Call]:
        agent = data.draw(st.sampled_from(agents))
        known = agent.get_policy_parameters()
        given = bad_columns(data, known, "unknown")

        def act(parameters: Any) -> None:
            world.update_policy(parameters)
            world.generate_batch_experiences(agent, 4)

        yield lambda: act(given)
        yield lambda: act({})
        yield lambda: world.update_policy(data.draw(arrays((3,))))
        yield lambda: world.generate_batch_experiences(agent, data.draw(st.sampled_from([0, -1, 3, 0.5])))

    return calls


def loaded() -> Entry:
    """Policies of finished runs that are shown arbitrary observations: networks, a table, a memory, a team."""
    import steppe

    short: dict[str, Any] = {"runtime": "inline", "steps": 64, "envs": 1, "actors": 1, "evaluation.episodes": 1}
    short |= {"evaluation.max_episode_steps": 10}
    small = {"hidden": (4,), "segment_steps": 16}
    remembers = {"cell_size": 4, "sequence_length": 4, "burn_in": 1, "batch_size": 2, "learning_starts": 16}
    runs = {
        "ppo": steppe.train("CartPole-v1", algo="ppo", **small, **short),
        "table": steppe.train("Taxi-v4", algo="q-learning", **short),
        "r2d2": steppe.train("CartPole-v1", algo="r2d2", **small, **remembers, **short),
        "box": steppe.train("Pendulum-v1", algo="ppo", **small, **short),
        "frames": steppe.train("CartPole-v1", algo="ppo", **small, **short, **{"environment.frame_stack": 2}),
        "team": steppe.train("steppe/Teamwork-v0", algo="ppo", **small, **short),
    }
    policies = {name: steppe.load(run.path) for name, run in runs.items()}
    fits = {"table": (), "box": (3,), "team": ()}

    def calls(data: st.DataObject) -> Iterator[Call]:
        name = data.draw(st.sampled_from(sorted(policies)))
        policy, one = policies[name], fits.get(name, (4,))
        seen, mask = data.draw(arrays(one, (3, *one))), data.draw(arrays((6,), (3, 6), (2,)))
        explore = data.draw(st.booleans())
        yield lambda: policy.act(seen, explore=explore)
        if name == "team":
            yield lambda: policy.act({"agent_0": seen, "agent_1": mask}, explore=explore)
        else:
            yield lambda: policy.act(seen, explore=explore, action_mask=mask)
        yield policy.reset
        raw = policy.agent
        batch = data.draw(arrays((3, *one), one))
        yield lambda: policy.act({"agent_0": batch} if name == "team" else batch)
        yield lambda: raw.load(policy.weights)

    return calls


def codec() -> Entry:
    from steppe.core.contracts.segment import Segment, SegmentHeader
    from steppe.core.contracts.weights import Weights
    from steppe.core.io import codec as under_test

    spec = SegmentSpec(2, 2, *SPEC.fields)
    segment = Segment.blank(spec)
    segment.header = SegmentHeader("fuzz", 0, 0, 0, 0)
    whole = {
        "segment": under_test.encode_segment(segment),
        "weights": under_test.encode_weights(Weights.from_arrays({"w": np.zeros(3, np.float32)})),
    }

    def calls(data: st.DataObject) -> Iterator[Call]:
        garbage = data.draw(st.binary(max_size=200))
        tree = under_test.unpack(whole[data.draw(st.sampled_from(sorted(whole)))])
        place = tree.get("columns", tree)
        replaced = data.draw(arrays((2, 2), (12,), (3, 2, 2)))
        if isinstance(replaced, np.ndarray) and replaced.dtype.kind in "biufc":
            place[data.draw(st.sampled_from(sorted(place)))] = replaced
        forged = under_test.pack(tree)
        for bytes_of in (garbage, forged, forged[: len(garbage)], whole["segment"][: len(garbage)] + garbage):
            yield lambda bytes_of=bytes_of: under_test.unpack(bytes_of)
            yield lambda bytes_of=bytes_of: under_test.decode_segment(bytes_of, spec)
            yield lambda bytes_of=bytes_of: under_test.decode_weights(bytes_of)

    return calls


def segments() -> Entry:
    """Raw bytes in the memory of shared memory, MPI and Ray, and messages of Kafka, as far as the learner's memory."""
    from steppe import DistributedAgent
    from steppe.core.array_checks import require_segment
    from steppe.core.contracts.algorithm import Learned, Progress
    from steppe.core.contracts.segment import SegmentHeader
    from steppe.core.io.codec import decode_segment, encode_segment
    from steppe.core.system.shared_dir import make_shared_dir
    from steppe.replay.factory import make_memory
    from steppe.transport.frames import SegmentFrame
    from steppe.transport.shm import ShmChannel

    learned, small = {}, {"buffer_size": 64, "learning_starts": 0}
    windows = small | {"sequence_length": 2, "burn_in": 1}
    changes = {"dqn": small, "ppo": {}, "r2d2": windows, "dhc": windows}
    made = {"r2d2": {"cell_size": 4, "hidden": (4,)}, "dhc": {"channels": 8}}
    for name, update in changes.items():
        world = TEAM if name == "dhc" else SPEC
        agent = DistributedAgent(name, batch_size=ROWS, config=made.get(name)).bind(world)
        config = agent.agent.config.model_copy(update=update)
        spec = SegmentSpec(3, 2, *world.fields, config.columns(world), num_agents=world.num_agents)
        learned[name] = agent.agent, config, spec, ShmChannel(make_shared_dir("fuzz", 1), spec, "fuzz", 1, create=True)

    def calls(data: st.DataObject) -> Iterator[Call]:
        agent, config, spec, channel = learned[data.draw(st.sampled_from(sorted(learned)))]
        segment = channel.blank(0)
        for column in segment.columns.values():
            column.fill(0)
        segment["valid"][...] = True
        for name in data.draw(st.lists(st.sampled_from(sorted(segment.columns)), max_size=2)):
            raw = segment[name].view(np.uint8).reshape(-1)
            place = data.draw(st.integers(0, len(raw) - 1))
            raw[place : place + 8] = data.draw(st.sampled_from([0, 1, 2, 7, 127, 128, 255]))
        segment.header = SegmentHeader("fuzz", 0, 0, 0, 0)
        channel.offer(segment)
        arrived = channel.poll()
        frame = SegmentFrame(spec, 0)
        for name, column in arrived.columns.items():
            frame.segment[name].view(np.uint8)[...] = column.view(np.uint8)
        frame.write(0, segment.header, None)
        stream = np.random.default_rng(0)

        def learn(found: Any) -> None:
            require_segment(found)
            memory = make_memory(config, spec, stream=stream, total_steps=None)
            agent.observe(found, Progress(1, 1000))
            memory.add([found])
            if memory.ready():
                batch = memory.sample()
                memory.update(batch, agent.learn(batch) or Learned(0))

        yield lambda: learn(arrived)
        yield lambda: learn(frame.read("fuzz", 0, None))
        yield lambda: learn(decode_segment(encode_segment(arrived), spec))
        channel.release(arrived)

    return calls


ENTRIES: dict[str, Callable[[], Entry]] = {
    "composition": composition, "episodes": episodes, "replay": replay, "classic": classic, "params": params,
    "federated": federated, "client": client, "environment": environment, "loaded": loaded, "codec": codec,
    "segments": segments,
}  # fmt: skip


def main(name: str, examples: int) -> int:
    """Run one entry; 0 when nothing but answers and SteppeError came of it."""
    calls = ENTRIES[name]()

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(st.data())
    def feed(data: st.DataObject) -> None:
        for call in calls(data):
            try:
                call()
            except SteppeError:
                continue
            except Exception as error:  # noqa: BLE001 - what this process is there to find
                frame = traceback.extract_tb(error.__traceback__)[-1]
                foreign.setdefault((frame.filename, frame.lineno or 0), traceback.format_exc())

    foreign: dict[tuple[str, int], str] = {}
    feed()
    for words in foreign.values():
        print(words, file=sys.stderr)
    print(f"{name}: {examples} examples, {len(foreign)} foreign errors")
    return int(bool(foreign))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        import os

        os.chdir(Path(home))
        warnings.simplefilter("ignore")
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
