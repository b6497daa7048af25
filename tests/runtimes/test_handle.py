"""Taking turns: who is stepped, who is closed, and who is blamed."""

from __future__ import annotations

import pytest

from steppe.core.contracts.errors import EnvironmentFault, NotFinite, UsageError
from steppe.runtimes.handle import Fault, RoleScheduler, temporary_torch_settings

pytestmark = pytest.mark.unit


class Scripted:
    """Does what its script says, one word a step: work, idle, done or an exception."""

    def __init__(self, name, script, closing=None):
        self.name, self.script, self.done, self.closing = name, list(script), False, closing
        self.steps, self.closed = 0, 0

    def step(self):
        action = self.script[min(self.steps, len(self.script) - 1)]
        self.steps += 1
        if isinstance(action, Exception):
            raise action
        self.done = action == "done"
        return action == "work"

    def close(self):
        self.closed += 1
        if self.closing is not None:
            raise self.closing


def test_every_role_is_stepped_once():
    roles = [Scripted(name, ["work"]) for name in "abc"]
    scheduler = RoleScheduler(roles)
    assert scheduler.step()
    assert scheduler.step()
    assert [role.steps for role in roles] == [2, 2, 2]


def test_whether_anyone_did_anything():
    assert not RoleScheduler([Scripted("a", ["idle"]), Scripted("b", ["idle"])]).step()
    assert RoleScheduler([Scripted("a", ["idle"]), Scripted("b", ["work"])]).step()


def test_a_finished_role_is_closed_once_and_not_stepped_again():
    one, other = Scripted("a", ["done"]), Scripted("b", ["work"])
    scheduler = RoleScheduler([one, other])
    scheduler.step()
    scheduler.step()
    scheduler.close()
    assert (one.steps, one.closed) == (1, 1)
    assert (other.steps, other.closed) == (2, 1)
    assert scheduler.faults == []


def test_a_role_that_raises_is_removed_and_the_others_continue():
    one, other = Scripted("a", [ValueError("broken")]), Scripted("b", ["work"])
    scheduler = RoleScheduler([one, other])
    assert scheduler.step()
    scheduler.step()
    (fault,) = scheduler.faults
    assert (fault.role, fault.reason, fault.message) == ("a", "error", "ValueError: broken")
    assert "test_handle.py" in fault.details["traceback"]
    assert (one.done, one.steps, one.closed) == (True, 1, 0)
    assert other.steps == 2


def test_closing_goes_on_after_one_that_fails():
    roles = [Scripted("a", ["work"], OSError("disk full")), Scripted("b", ["work"])]
    scheduler = RoleScheduler(roles)
    scheduler.close()
    assert [role.closed for role in roles] == [1, 1]
    assert [fault.role for fault in scheduler.faults] == ["a"]


def test_faults_are_in_the_order_they_came():
    scheduler = RoleScheduler([Scripted("a", ["work", ValueError()]), Scripted("b", [ValueError()])])
    scheduler.step()
    scheduler.step()
    assert [fault.role for fault in scheduler.faults] == ["b", "a"]


def test_an_interrupt_is_not_recorded_as_a_fault():
    class Interrupted(Scripted):
        def step(self):
            raise KeyboardInterrupt

    scheduler = RoleScheduler([Interrupted("a", [])])
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    assert scheduler.faults == []


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (NotFinite("obs is nan"), "not_finite", "obs is nan"),
        (UsageError("say it otherwise"), "error", "say it otherwise"),
        (KeyError("x"), "error", "KeyError: 'x'"),
        (EnvironmentFault("it raised", {"seed": 4, "traceback": "theirs"}), "environment_fault", "it raised"),
    ],
)
def test_what_an_exception_amounts_to(error, reason, message):
    fault = Fault.of("actor-1", error)
    assert (fault.role, fault.reason, fault.message) == ("actor-1", reason, message)
    assert fault.details["traceback"]
    if reason == "environment_fault":
        assert fault.details == {"seed": 4, "traceback": "theirs"}


def test_torch_is_given_back_as_it_was():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with temporary_torch_settings(1):
            assert torch.get_num_threads() == 1
            assert torch.tensor(1e-40) * 1.0 == 0.0  # denormals are flushed
            with temporary_torch_settings(1):
                pass
            assert torch.tensor(1e-40) * 1.0 == 0.0
        assert torch.get_num_threads() == 2
        assert torch.tensor(1e-40) * 1.0 != 0.0
    finally:
        torch.set_num_threads(before)
