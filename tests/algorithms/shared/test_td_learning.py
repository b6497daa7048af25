"""The parts of agents that learn action values from sequences, against plain Python and autograd."""

import numpy as np
import pytest
import torch

from steppe.algorithms.shared.td_learning import (
    RecurrentState,
    apex_epsilons,
    epsilon_greedy,
    first_learned_step,
    large_margin_loss,
    td_loss,
)
from steppe.core.contracts.errors import NotFinite
from steppe.core.contracts.segment import Batch
from steppe.core.priorities import sequence_priority
from steppe.core.value_rescaling import inverse_rescale_value, rescale_value

pytestmark = pytest.mark.unit
ROWS, COUNT, ACTIONS = 7, 5, 3


def windows(seed=0, weights=True):
    """A batch as replay lays it: sequences of other lengths, rows that repeat the last one, ends of both kinds."""
    stream = np.random.default_rng(seed)
    lead, steps = stream.integers(0, 3, COUNT), stream.integers(1, 4, COUNT)
    t = np.arange(ROWS)[:, None]
    learn = (t >= lead) & (t < lead + steps)
    columns = {
        "action": stream.integers(0, ACTIONS, (ROWS, COUNT)),
        "reward": (3.0 * stream.normal(size=(ROWS, COUNT))).astype(np.float32),
        "discount": stream.uniform(0.5, 1.0, (ROWS, COUNT)).astype(np.float32),
        "terminated": stream.random((ROWS, COUNT)) < 0.3,
        "following": np.minimum(t + stream.integers(1, 3, (ROWS, COUNT)), ROWS - 1),
        "learn": learn,
    }
    return Batch(columns, weights=stream.random(COUNT).astype(np.float32) if weights else None)


def values_of(seed):
    return (4.0 * np.random.default_rng(seed).normal(size=(ROWS, COUNT, ACTIONS))).astype(np.float32)


def by_hand(values, judged, batch, *, double, value_rescaling):
    """(loss, errors), a step at a time."""
    losses, errors, number = [], np.zeros((ROWS, COUNT)), int(batch["learn"].sum())
    for t, n in zip(*np.nonzero(batch["learn"]), strict=True):
        target = float(batch["reward"][t, n])
        if not batch["terminated"][t, n]:
            then = int(batch["following"][t, n])
            chooser = values.detach().numpy() if double else judged
            ahead = float(judged[then, n, int(np.argmax(chooser[then, n]))])
            if value_rescaling:
                ahead = np.sign(ahead) * (((1 + 4e-3 * (abs(ahead) + 1.001)) ** 0.5 - 1) ** 2 / 4e-6 - 1)
            target += float(batch["discount"][t, n]) * ahead
        if value_rescaling:
            target = np.sign(target) * ((abs(target) + 1) ** 0.5 - 1) + 1e-3 * target
        value = values[t, n, int(batch["action"][t, n])]
        weight = 1.0 if batch.weights is None else float(batch.weights[n])
        losses.append(weight * torch.nn.functional.huber_loss(value, torch.tensor(target).double()) / number)
        errors[t, n] = abs(value.item() - target)
    return torch.stack(losses).sum(), errors


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("value_rescaling", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_loss_gradient_and_errors_are_those_of_the_formula(double, value_rescaling, weights):
    batch, values, judged = windows(weights=weights), values_of(1), values_of(2)
    leaf = torch.from_numpy(values).double().requires_grad_()
    loss, errors = by_hand(leaf, judged, batch, double=double, value_rescaling=value_rescaling)
    loss.backward()
    found = td_loss(values, judged, batch, double=double, value_rescaling=value_rescaling)
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    np.testing.assert_allclose(found.gradient, leaf.grad, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.errors, errors, rtol=1e-5, atol=1e-6)
    learned, chosen = batch["learn"], np.take_along_axis(values, batch["action"][..., None], axis=2)[..., 0]
    assert found.mean_value == pytest.approx(chosen[learned].mean(), rel=1e-5)
    assert found.mean_error == pytest.approx(errors[learned].mean(), rel=1e-5)


@pytest.mark.parametrize("double", [False, True])
def test_of_equal_actions_the_first_is_the_next(double):
    """As argmax chooses it."""
    batch, values, judged = windows(), values_of(1), values_of(2)
    (values if double else judged)[...] = 1.0
    _, errors = by_hand(torch.from_numpy(values).double(), judged, batch, double=double, value_rescaling=False)
    found = td_loss(values, judged, batch, double=double, value_rescaling=False)
    np.testing.assert_allclose(found.errors, errors, rtol=1e-5, atol=1e-6)


def test_rows_that_are_not_learned_from_are_not_read():
    batch, values, judged = windows(), values_of(1), values_of(2)
    plain = td_loss(values, judged, batch, double=False, value_rescaling=False)
    batch["reward"][~batch["learn"]] = np.nan
    batch["discount"][~batch["learn"]] = np.nan
    again = td_loss(values, judged, batch, double=False, value_rescaling=False)
    assert again.loss == plain.loss
    np.testing.assert_array_equal(again.gradient, plain.gradient)


def test_a_loss_that_is_no_number_names_the_update():
    batch = windows()
    batch["reward"][...] = np.nan
    with pytest.raises(NotFinite, match="loss is nan at update 17"):
        td_loss(values_of(1), values_of(2), batch, double=True, value_rescaling=True).require_finite(17)


def test_a_judgement_stays_as_it_is():
    found = td_loss(values_of(1), values_of(2), windows(), double=True, value_rescaling=True)
    with pytest.raises(AttributeError):
        found.loss = 0.0


def test_the_loss_of_advice_is_a_margin_over_every_other_action():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(4, 6, 5)).astype(np.float32)
    advised = rng.random((4, 6, 5)) < 0.4
    assert not advised.any(axis=2).all(), "some have no advice, and do not count"
    learn = rng.random((4, 6)) < 0.7
    traced = torch.tensor(values, requires_grad=True)
    lags = []
    for t, i in np.argwhere(learn & advised.any(axis=2)).tolist():
        best = max(traced[t, i, a] for a in range(5) if advised[t, i, a])
        others = [traced[t, i, a] + 0.4 for a in range(5) if not advised[t, i, a]]
        lags.append(max([best, *others]) - best)
    loss = torch.stack(lags).mean()
    loss.backward()
    lag, gradient = large_margin_loss(values, advised, learn, 0.4)
    assert lag == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, traced.grad.numpy(), atol=1e-7)
    assert np.abs(gradient).sum() > 0
    assert large_margin_loss(values, advised, np.zeros_like(learn), 0.4)[0] == 0.0


def test_the_advice_of_one_row_counts_whole():
    values = np.array([[[1.0, 3.0]]], np.float32)
    lag, gradient = large_margin_loss(values, np.array([[[True, False]]]), np.ones((1, 1), bool), 0.5)
    assert lag == 2.5
    assert gradient.tolist() == [[[-1.0, 1.0]]]


def test_sequences_begin_where_they_are_first_learned_from():
    learn = windows()["learn"]
    first = first_learned_step(learn)
    assert first.sum(axis=0).tolist() == [1] * COUNT
    for n in range(COUNT):
        assert np.argmax(first[:, n]) == next(t for t in range(ROWS) if learn[t, n])


def test_rescaling_can_be_undone():
    values = np.array([-1e6, -300.0, -1.0, -1e-3, 0.0, 1e-6, 0.5, 2.0, 1e4])
    np.testing.assert_allclose(inverse_rescale_value(rescale_value(values)), values, rtol=1e-6, atol=1e-9)
    assert rescale_value(3.0) == pytest.approx(1.003)  # √4 − 1 + .003
    assert (np.diff(rescale_value(values)) > 0).all()


def test_the_ladder_is_one_over_all_environments_of_all_actors():
    """0.4 ** (1 + 7 i / (N − 1)) in some order, with the most and the least exploring in different actors."""
    parts = [apex_epsilons(0.4, 7.0, 3, actor, 4) for actor in range(4)]
    together = np.concatenate(parts)
    np.testing.assert_allclose(np.sort(together)[::-1], [0.4 ** (1 + 7 * i / 11) for i in range(12)])
    assert parts[0].max() == 0.4
    assert all(part.max() > 5 * part.min() for part in parts)
    np.testing.assert_allclose([apex_epsilons(0.4, 7.0, 1, actor, 3)[0] for actor in range(3)], [0.4, 0.4**4.5, 0.4**8])
    assert apex_epsilons(0.4, 7.0, 1, 0, 1).tolist() == [0.4]
    np.testing.assert_allclose(apex_epsilons(0.4, 7.0, 2, 0, 1), [0.4, 0.4**8])
    assert apex_epsilons(0.0, 7.0, 2, 0, 1).tolist() == [0.0, 0.0]


def test_the_share_of_random_actions_is_each_environments_own():
    stream, epsilon = np.random.default_rng(0), np.array([0.0, 0.5, 1.0])
    drawn = np.stack([epsilon_greedy(np.full(3, 9), 4, epsilon, stream) for _ in range(4000)])
    np.testing.assert_allclose((drawn != 9).mean(axis=0), epsilon, atol=0.03)
    assert set(drawn[:, 2]) == {0, 1, 2, 3}


def test_what_is_remembered_is_forgotten_at_starts_only():
    memory = RecurrentState((2,))
    assert memory.state.shape == (0, 2), "there are no environments yet"
    memory.begin(3)
    first = memory.reset_where(np.ones(3, bool))
    assert not first.any()
    memory.keep(np.arange(6, dtype=np.float32).reshape(3, 2))
    kept = memory.reset_where(np.array([False, True, False]))
    assert kept.tolist() == [[0, 1], [0, 0], [4, 5]]
    assert not first.any(), "what was given out before is not changed"
    assert not memory.reset_where(np.zeros(5, bool)).any(), "another number of environments begins anew"


def test_a_priority_is_mostly_the_largest_error():
    errors, learn = np.array([[1.0, 5.0], [3.0, 9.0]]), np.array([[True, True], [True, False]])
    np.testing.assert_allclose(sequence_priority(errors, learn), [0.9 * 3 + 0.1 * 2, 5.0])
