"""Replay buffers: adding, sampling, updating, images, saving, loading, and the learner's wait for batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dqn_cartpole import ZOO
from suite.claims import Claim, further, further_ratio, ratio, ratio_to_smallest
from suite.measuring import Case, Row
from suite.ours import Figures, Finished, train, workload
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

OURS, NUMPY, CPPRB = "Steppe", "NumPy columns", "cpprb"
TIANSHOU, TORCHRL, RLLIB, SB3, REVERB = "Tianshou", "TorchRL", "RLlib", "Stable-Baselines3", "Reverb"
MEMORY = {"grown_mib": "buffer, MiB", "rss_mib": "whole process, MiB"}
STACK_MIB = 2 * 4 * 84 * 84 / 2**20  # one transition with complete stacks


def settings(effort: Effort, capacity: int) -> dict[str, Any]:
    """Amount of work: with --quick a tenth of the rows and a short time per figure."""
    quick = {"capacity": capacity // 10, "seconds": 0.2, "fill_s": 2.0}
    return quick if effort.quick else {"capacity": capacity, "seconds": 2.0}


def words(given: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in given.items()]


def own(label: str, side: str, task: str, given: Mapping[str, Any]) -> Case:
    return workload(label, "buffers", side, task, *words(given))


def others(names: Mapping[str, str], task: str, given: Mapping[str, Any], value: str = "steps_per_s") -> list[Case]:
    return [peer(label, name, task, settings=words(given), value=value) for label, name in names.items()]


def prioritized(effort: Effort) -> Part:
    given = settings(effort, 1_000_000)
    peers = {CPPRB: "cpprb", TIANSHOU: "tianshou", TORCHRL: "torchrl", RLLIB: "rllib", REVERB: "reverb"}
    rows = effort.measure(
        [own(OURS, "steppe", "replay-prioritized", given), *others(peers, "replay-prioritized", given)]
    )

    def claim(what: str, key: str, asked: float) -> Claim:
        return Claim(f"prioritized replay, {what} / cpprb", asked, further_ratio(rows, key, OURS, CPPRB))

    return Part(
        "Prioritized",
        "A million transitions of float32[8] observations (obs, action, reward, next_obs, done). A cycle adds a block of 64, "
        "draws a batch of 256 with importance weights and updates its priorities; add, draw and update were then timed each "
        "alone. A buffer that was not full after 20 s was measured as full as it was (filled).",
        "cycles/s",
        rows,
        [
            Claim("prioritized replay, cycle / cpprb", 6, ratio(rows, OURS, CPPRB)),
            Claim("prioritized replay, cycle / TorchRL", 15, ratio(rows, OURS, TORCHRL)),
            claim("draw", "batches_per_s", 5),
            claim("add", "adds_per_s", 5),
            claim("update", "updates_per_s", 0.6),
        ],
        columns={
            "adds_per_s": "transitions added/s",
            "batches_per_s": "batches drawn/s",
            "updates_per_s": "batches updated/s",
            "filled": "filled",
            **MEMORY,
        },
    )


def uniform(effort: Effort) -> Part:
    given = settings(effort, 1_000_000)
    peers = {CPPRB: "cpprb", TIANSHOU: "tianshou", TORCHRL: "torchrl", SB3: "sb3", RLLIB: "rllib", REVERB: "reverb"}
    sides = [own(OURS, "steppe", "replay-uniform", given), own(NUMPY, "numpy", "replay-uniform", given)]
    rows = effort.measure([*sides, *others(peers, "replay-uniform", given)])
    return Part(
        "Uniform",
        "The same transitions without priorities: batches of 256, and adding in blocks of 64 and of 1,024. NumPy columns are "
        "slices written and fancy indices read, without a buffer around them.",
        "batches/s",
        rows,
        [
            Claim("uniform replay, draw / cpprb", 1.8, ratio(rows, OURS, CPPRB)),
            Claim("uniform replay, add in blocks of 64 / NumPy", 0.5, further_ratio(rows, "adds_per_s", OURS, NUMPY)),
            Claim(
                "uniform replay, add in blocks of 1,024 / NumPy",
                0.8,
                further_ratio(rows, "adds_1024_per_s", OURS, NUMPY),
            ),
        ],
        columns={
            "adds_per_s": "added/s, blocks of 64",
            "adds_1024_per_s": "added/s, blocks of 1,024",
            "filled": "filled",
            **MEMORY,
        },
    )


def images(effort: Effort) -> Part:
    given = settings(effort, 50_000)
    shared, stacking = f"{CPPRB}, frames shared", f"{TIANSHOU}, frames stacked when drawn"
    task = "replay-images"
    cases = [own(OURS, "steppe", task, given), own(NUMPY, "numpy", task, given)]
    cases += others({CPPRB: "cpprb", TIANSHOU: "tianshou", TORCHRL: "torchrl", SB3: "sb3"}, task, given)
    cases.append(peer(shared, "cpprb", "replay-images-compressed", settings=words(given)))
    cases.append(peer(stacking, "tianshou", "replay-images-stacking", settings=words(given)))
    rows = effort.measure(cases)
    theirs = [case.label for case in cases[1:] if not rows[case.label].error]
    grown = [run.reading.extra["grown_mib"] for run in rows[OURS].runs]
    stored = given["capacity"] * STACK_MIB
    return Part(
        "Images",
        "Stacks of 4 frames of 84 × 84 bytes in 50,000 transitions (obs and next_obs): batches of 256, and the memory that "
        "the buffer took. Peers that can store a frame once are shown both ways.",
        "batches/s",
        rows,
        [
            Claim("images, draw / the fastest peer", 1.3, ratio(rows, OURS, *theirs)),
            Claim(
                "images, memory / stacks stored as they are",
                0.25,
                sorted(grown)[len(grown) // 2] / stored if grown else None,
                at_least=False,
            ),
        ],
        columns=MEMORY,
    )


def saving(effort: Effort) -> Part:
    given, task = settings(effort, 1_000_000), "replay-save"
    cases = [own(OURS, "one", task, given), own(NUMPY, "numpy", task, given)]
    cases += others(
        {CPPRB: "cpprb", TIANSHOU: "tianshou", TORCHRL: "torchrl", SB3: "sb3"}, task, given, "save_and_load_s"
    )
    rows = effort.measure(cases)

    def inverse(key: str) -> float | None:
        found = further_ratio(rows, key, OURS, CPPRB)
        return 1 / found if found else None

    return Part(
        "Save and load",
        "A million transitions to disk and back into an empty buffer, the fastest of three saves. Steppe hashes, syncs and "
        "keeps priorities and random streams; the NumPy columns are written and synced; peers save in their own way, without "
        "syncing (cpprb compresses, and leaves priorities out). SB3 and NumPy have no priorities to save.",
        "s, save and load",
        rows,
        [
            Claim("save, times as fast as cpprb's", 5, inverse("save_s")),
            Claim("save and load, times as fast as cpprb's", 5, inverse("save_and_load_s")),
            Claim(
                "save / writing and syncing with NumPy", 3, further_ratio(rows, "save_s", OURS, NUMPY), at_least=False
            ),
            Claim("load / writing and syncing with NumPy", 3, _over(rows, "load_s", "save_s"), at_least=False),
        ],
        columns={"save_s": "save, s", "load_s": "load, s", "saved_mib": "on disk, MiB", **MEMORY},
    )


def _over(rows: Mapping[str, Row], key: str, other: str) -> float | None:
    """Ratio of one of our figures to one of NumPy's."""
    mine, theirs = further(rows, OURS, key), further(rows, NUMPY, other)
    return mine / theirs if mine is not None and theirs else None


def pool(effort: Effort) -> Part:
    given, one, eight = settings(effort, 1_000_000), "Steppe, a pool of one buffer", "Steppe, a pool of 8 buffers"
    task = "replay-prioritized"
    rows = effort.measure([own(one, "one", task, given), own(eight, "eight", task, given)])
    cost = ratio_to_smallest(rows, one, eight)
    return Part(
        "A pool of 8",
        "The cycle of the prioritized buffer through `ReplayBufferPool`, with the same number of transitions in one buffer and "
        "in 8, written to in turn.",
        "cycles/s",
        rows,
        [Claim("a pool of 8 buffers, time of a cycle / a pool of one", 1.15, cost, at_least=False)],
        columns={
            "adds_per_s": "transitions added/s",
            "batches_per_s": "batches drawn/s",
            "updates_per_s": "batches updated/s",
            **MEMORY,
        },
    )


def waiting_share(run: Finished) -> Figures:
    """Share of the learner's time that it waits for batches."""
    phases = run.summary["time_shares"]["learner"]
    return {"value": 100 * phases["sample"], "remember": 100 * phases["remember"], "learn": 100 * phases["learn"]}


def learner(effort: Effort) -> Part:
    steps = ("--steps", str(effort.of(20_000, 4_000)), "--envs", "8", "-s", "segment_steps=32")
    plain, by_priority = "Steppe, uniform", "Steppe, prioritized"
    rows = effort.measure(
        [
            train(plain, "CartPole-v1", *steps, *ZOO, figures=waiting_share),
            train(by_priority, "CartPole-v1", *steps, *ZOO, "-s", "prioritized=true", figures=waiting_share),
        ]
    )
    return Part(
        "The learner's share of waiting for samples",
        "DQN on CartPole as in its own benchmark: the share of the learner's time from asking for a batch to having it. "
        "Taking in experience and updating priorities are beside it.",
        "%",
        rows,
        [_share(rows, plain), _share(rows, by_priority)],
        columns={"remember": "taking in and updating, %", "learn": "learning, %"},
    )


def _share(rows: Mapping[str, Row], label: str) -> Claim:
    kind = label.removeprefix("Steppe, ")
    return Claim(f"DQN, learner waits for samples, {kind}", 5, rows[label].median, unit="%", at_least=False)


PARTS = {
    "prioritized": prioritized,
    "uniform": uniform,
    "images": images,
    "saving": saving,
    "pool": pool,
    "learner": learner,
}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))
