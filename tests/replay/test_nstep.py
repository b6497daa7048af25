"""n-step transitions against the definition, written out in plain Python over the steps an actor really took."""

import numpy as np
import pytest

from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.replay.nstep import NStepAccumulator, transition_fields
from steppe.testing.memory import ScriptedActor

pytestmark = pytest.mark.unit

GAMMA = 0.9


def spec_of(num_steps, num_envs):
    return SegmentSpec(num_steps, num_envs, FieldSpec("obs", (4,), "float32"), FieldSpec("action", (), "int64"))


def rows_of(blocks):
    """Blocks as plain tuples, in no particular order (a step has one observation of its own)."""
    return sorted(
        (tuple(o), int(a), float(r), tuple(n), bool(t), float(d))
        for block in blocks
        for o, a, r, n, t, d in zip(
            *(block[name] for name in ("obs", "action", "reward", "next_obs", "terminated", "discount")), strict=True
        )
    )


def lives(steps, seen):
    """Steps in unbroken stretches: one environment, one episode, segments that were seen and follow each other."""
    stretches = {}
    for step in steps:
        if step.sequence in seen:
            lost = sum(number not in seen for number in range(step.sequence))
            stretches.setdefault((step.env, step.obs[2], lost), []).append(step)
    return stretches.values()


def expected(steps, seen, n_step):
    """The definition. Windows that the newest segment leaves open are not there yet."""
    rows = []
    newest = max(seen)
    for stretch in lives(steps, seen):
        for start in range(len(stretch)):
            window = stretch[start : start + n_step]
            last = window[-1]
            cut = last.terminated or last.truncated
            lost = any(number not in seen for number in range(last.sequence, newest))
            if not (cut or len(window) == n_step or lost):
                continue
            total = sum(GAMMA**k * step.reward for k, step in enumerate(window))
            first = window[0]
            rows.append((first.obs, first.action, total, last.next_obs, last.terminated, GAMMA ** len(window)))
    return sorted(rows)


def require_same(found, wanted):
    assert len(found) == len(wanted)
    for row, want in zip(found, wanted, strict=True):
        assert (row[0], row[1], row[3], row[4]) == (want[0], want[1], want[3], want[4])
        assert row[2] == pytest.approx(want[2], abs=1e-5)
        assert row[5] == pytest.approx(want[5], rel=1e-6)


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("n_step", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 9])
def test_windows_follow_the_definition(num_steps, n_step, next_step):
    spec = spec_of(num_steps, 3)
    windows = NStepAccumulator(spec, n_step, GAMMA)
    actor = ScriptedActor(spec, seed=num_steps * 100 + n_step, next_step=next_step)
    blocks = []
    for count in range(1, 60 // num_steps):
        blocks += windows.transitions(actor.segment())
        require_same(rows_of(blocks), expected(actor.steps, range(count), n_step))
    assert any(step.terminated for step in actor.steps)
    assert any(step.truncated and not step.terminated for step in actor.steps)


@pytest.mark.parametrize("n_step", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_segments_that_were_dropped_close_windows_early(num_steps, n_step):
    spec = spec_of(num_steps, 2)
    windows = NStepAccumulator(spec, n_step, GAMMA)
    actor = ScriptedActor(spec, seed=num_steps * 7 + n_step, next_step=True)
    drop = np.random.default_rng(n_step)
    blocks, seen = [], set()
    for sequence in range(80 // num_steps):
        segment = actor.segment()
        if drop.random() < 0.75:
            seen.add(sequence)
            blocks += windows.transitions(segment)
            require_same(rows_of(blocks), expected(actor.steps, seen, n_step))
    assert 0 < len(seen) < actor.sequence


def test_where_a_life_is_divided_changes_nothing():
    """The same steps in segments of 12, and of 3 cut out of them."""
    long, short = spec_of(12, 2), spec_of(3, 2)
    whole, pieces = NStepAccumulator(long, 4, GAMMA), NStepAccumulator(short, 4, GAMMA)
    actor = ScriptedActor(long, seed=4, next_step=True)
    one, other = [], []
    for number in range(5):
        segment = actor.segment()
        one += whole.transitions(segment)
        for k in range(4):
            columns = {name: column[3 * k : 3 * k + 3 + (name == "obs")] for name, column in segment.columns.items()}
            other += pieces.transitions(Segment(short, columns, SegmentHeader("r", 0, 0, 4 * number + k, 0)))
    assert rows_of(one) == rows_of(other)


def test_an_actor_that_began_anew_does_not_continue_its_old_windows():
    spec = spec_of(4, 1)
    windows = NStepAccumulator(spec, 3, GAMMA)
    actor = ScriptedActor(spec, seed=1)
    blocks = windows.transitions(actor.segment())
    actor.restart_episode()
    for _ in range(3):
        blocks += windows.transitions(actor.segment())
    rows = rows_of(blocks)
    assert all(row[0][2] == row[3][2] for row in rows)  # the same episode before and after
    assert {row[0] for row in rows} >= {step.obs for step in actor.steps if step.sequence < 3}


def test_actors_are_never_mixed():
    spec = spec_of(3, 2)
    windows = NStepAccumulator(spec, 4, GAMMA)
    actors = [ScriptedActor(spec, actor=index, seed=9) for index in range(3)]
    blocks = []
    for _ in range(12):
        for actor in actors:
            blocks += windows.transitions(actor.segment())
    require_same(rows_of(blocks), sorted(row for actor in actors for row in expected(actor.steps, range(12), 4)))


def test_an_invalid_row_without_a_cut_ends_a_window_there():
    spec = spec_of(4, 1)
    segment = Segment.blank(spec)
    segment["obs"][:, 0, 0] = range(5)
    segment["reward"][:, 0] = 1
    segment["valid"][:, 0] = [True, True, False, True]
    segment.header = SegmentHeader("r", 0, 0, 0, 0)
    (block,) = NStepAccumulator(spec, 3, GAMMA).transitions(segment)
    np.testing.assert_array_equal(block["obs"][:, 0], [0, 1])
    np.testing.assert_array_equal(block["next_obs"][:, 0], [2, 2])
    np.testing.assert_allclose(block["reward"], [1.9, 1.0])
    np.testing.assert_allclose(block["discount"], [0.81, 0.9])
    assert not block["terminated"].any()


def test_columns_of_the_agent_are_those_of_the_first_step():
    extra = FieldSpec("q_val", (2,), "float64")
    spec = SegmentSpec(3, 1, FieldSpec("obs", (1,), "float32"), FieldSpec("action", (2,), "float32"), (extra,))
    windows, blocks = NStepAccumulator(spec, 2, GAMMA), []
    for sequence in range(2):
        segment = Segment.blank(spec)
        time = sequence * 3 + np.arange(4)
        segment["obs"][:, 0, 0] = time
        segment["action"][:, 0] = segment["q_val"][:, 0] = time[:3, None] + [0, 0.5]
        segment["valid"][:] = True
        segment.header = SegmentHeader("r", 0, 0, sequence, 0)
        blocks += windows.transitions(segment)
    joined = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    assert list(joined["obs"][:, 0]) == [0, 1, 2, 3, 4]
    assert list(joined["next_obs"][:, 0]) == [2, 3, 4, 5, 6]
    np.testing.assert_array_equal(joined["q_val"], joined["obs"] + [0, 0.5])
    np.testing.assert_array_equal(joined["action"], joined["q_val"])
    assert {f.name: (np.dtype(f.dtype), f.shape) for f in transition_fields(spec)} == {
        name: (rows.dtype, rows.shape[1:]) for name, rows in joined.items()
    }


def test_who_collected_a_segment_must_be_known():
    with pytest.raises(UsageError, match="header"):
        NStepAccumulator(spec_of(2, 1), 1, GAMMA).transitions(Segment.blank(spec_of(2, 1)))


@pytest.mark.parametrize("n_step", [2, 3, 6])
def test_open_windows_are_restored(n_step):
    """With segments shorter and longer than a window, another one goes on from the state as the first does."""
    spec = spec_of(4, 3)
    actors = [ScriptedActor(spec, actor) for actor in (0, 1)]
    first = NStepAccumulator(spec, n_step, GAMMA)
    for _ in range(5):
        for actor in actors:
            first.transitions(actor.segment())
    state = first.state()
    assert sorted(state) == ["0", "1"]
    for saved in state.values():
        assert {len(rows) for rows in saved["columns"].values()} == {n_step - 1}
    again = NStepAccumulator(spec, n_step, GAMMA)
    again.restore(state)
    for saved, same in zip(state.values(), again.state().values(), strict=True):
        assert saved["sequence"] == same["sequence"] == 4
        np.testing.assert_array_equal(saved["last_obs"], same["last_obs"])
        for name, rows in saved["columns"].items():
            np.testing.assert_array_equal(rows, same["columns"][name])
    for actor in actors:
        segment = actor.segment()
        require_same(rows_of(again.transitions(segment)), rows_of(first.transitions(segment)))
    for saved in again.state().values():
        assert {len(rows) for rows in saved["columns"].values()} == {n_step - 1}
