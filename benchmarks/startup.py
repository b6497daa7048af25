"""Start-up on a warm machine: from the command to the first environment step, and until eight actors collect."""

from __future__ import annotations

from suite.claims import Claim
from suite.ours import Figures, Finished, train
from suite.peers import peer
from suite.report import Part, middle
from suite.running import Effort, benchmark

ONE, EIGHT = "Steppe, `steppe train CartPole-v1`", "Steppe, 8 actors"


def first_step(run: Finished) -> Figures:
    """Seconds from the start of the process to the first environment step, and from there to the last actor's first."""
    first: dict[str, float] = {}
    for span in run.spans():
        if span.phase == "collect":
            first[span.role] = min(span.start_s, first.get(span.role, span.start_s))
    if len(first) < run.view.config.actors:
        return {"value": float("inf")}
    began = min(first.values())
    return {"value": began - run.account["began_s"], "all_after_s": max(first.values()) - began}


def first(effort: Effort) -> Part:
    traced = ("-s", "flow.trace_spans=40")
    eight = ("--actors", "8", "--mode", "async", "--steps", "100000")
    rows = effort.measure(
        [
            train(ONE, "CartPole-v1", "--steps", "20000", *traced, figures=first_step),
            train(EIGHT, "CartPole-v1", *eight, *traced, figures=first_step),
            peer("RLlib PPO", "rllib", "startup", value="first_step_s"),
            peer("Sample Factory", "sample_factory", "startup", value="first_step_s"),
        ],
        warm_ups=1,
    )
    after = middle(rows[EIGHT].record(), "all_after_s")
    return Part(
        "To the first environment step",
        "From the start of the process, imports included. One round before the measured ones warms the file cache.",
        "s",
        rows,
        [
            Claim("`steppe train` to the first environment step", 6, rows[ONE].median, unit="s", at_least=False),
            Claim("8 actors collecting, after the first", 3, after, unit="s", at_least=False),
        ],
        columns={"all_after_s": "all actors after the first, s"},
    )


PARTS = {"first": first}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))
