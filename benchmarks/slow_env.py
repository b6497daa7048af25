"""An environment that sleeps 10 ms in every step: the share of the ideal speed that many actors reach."""

from __future__ import annotations

from collections import defaultdict

from suite.claims import Claim, ratio
from suite.measuring import Case
from suite.ours import Figures, Finished, train
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

ACTORS, IDEAL_PER_ACTOR, SEGMENT = 16, 100.0, 64
UNIT = "steps/s"


def collection(run: Finished) -> Figures:
    """Steps per second of collection. Async: sum over actors, each from its first to its last step, waiting included.
    Sync: all actors from the first to the last step of a round, without the learner's time. The first segment is warm-up."""
    collected = [span for span in run.spans() if span.phase == "collect" and (span.sequence or 0) > 0]
    steps, lockstep = run.view.config.agent.segment_steps or 0, run.view.config.mode == "sync"
    groups = defaultdict(list)
    for span in collected:
        groups[span.sequence if lockstep else span.role].append(span)
    lasted = {key: max(s.end_s for s in spans) - min(s.start_s for s in spans) for key, spans in groups.items()}
    if lockstep:
        rate = steps * len(collected) / sum(lasted.values())
    else:
        rate = sum(steps * len(spans) / lasted[key] for key, spans in groups.items())
    ideal = IDEAL_PER_ACTOR * run.view.config.actors
    return {"value": rate, "share_of_ideal": rate / ideal, "run_steps_per_s": run.summary["steps_per_s"]}


def case(effort: Effort, mode: str, actors: int) -> Case:
    steps = effort.of(10, 4) * SEGMENT * actors
    words = ("--mode", mode, "--actors", str(actors), "--envs", "1", "--steps", str(steps))
    traced = ("-s", f"segment_steps={SEGMENT}", "-s", "flow.trace_spans=1000", "-s", "evaluation.every_steps=1000000")
    judged = ("-s", "evaluation.episodes=1")
    return train(label(mode, actors), "steppe/Sleep-v0", *words, *traced, *judged, figures=collection)


def label(mode: str, actors: int) -> str:
    return f"Steppe, {mode}, {actors} {'actor' if actors == 1 else 'actors'}"


def actors(effort: Effort) -> Part:
    own = [case(effort, mode, count) for mode in ("async", "sync") for count in (1, ACTORS)]
    steps = effort.of(16_384, 4_096)
    theirs = [
        peer("Stable-Baselines3, 16 workers", "sb3", "slow-env", steps=steps),
        peer("Sample Factory, 16 workers", "sample_factory", "slow-env", steps=steps),
    ]
    rows = effort.measure([*own, *theirs])
    reached = {mode: ratio(rows, label(mode, ACTORS), label(mode, 1)) for mode in ("async", "sync")}
    percent = {mode: None if found is None else 100 * found / ACTORS for mode, found in reached.items()}
    return Part(
        "Collection by 16 actors",
        "Ideal is 100 steps/s for each actor or worker. Steppe's rate is that of collection: in async with whatever actors "
        "waited, in sync the collection phase of each round. The peers' is that of the whole run.",
        UNIT,
        rows,
        [
            Claim("10 ms environment, async, 16 actors / 16 × one actor", 95, percent["async"], unit="%"),
            Claim(
                "10 ms environment, sync, 16 actors / 16 × one actor, collection phase", 90, percent["sync"], unit="%"
            ),
        ],
        columns={"share_of_ideal": "share of ideal", "run_steps_per_s": "whole run, steps/s"},
    )


PARTS = {"actors": actors}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))
