"""Pathfinding worlds of 40 × 40 cells: steps with observations and masks, new maps, and actors, compared with the original DHC."""

from __future__ import annotations

from suite.claims import Claim, ratio
from suite.ours import workload
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

ACTING = {4: 327, 16: 100, 64: 31.5}  # 1.5 × the known speed of the original on two such cores
ASKED = {4: 400_000, 16: 100_000, 64: 15_000}
TIMES_DHC = {4: 90, 16: 50, 64: 30}  # as a ratio, independent of the machine
WORLDS = 64
MAP_MS = 5.0
ACTOR_STEPS = {4: 8_000, 16: 2_048, 64: 512}
NETWORKS = {
    "full network": (128, 1.5),
    "small network": (32, 5.0),
}  # channels, and the target ratio to DHC's steps


def steps(effort: Effort) -> Part:
    cases = []
    for agents, asked in ASKED.items():
        words = ("--agents", str(agents), "--worlds", str(WORLDS), "--times", str(effort.of(4 * asked)))
        cases.append(workload(own(agents), "pathfinding", "steps", *words))
        tried = effort.of(asked // 50, asked // 500)
        cases.append(peer(original(agents), "dhc", "steps", steps=tried, settings=[f"agents={agents}"]))
    rows = effort.measure(cases)
    claims = [
        Claim(f"{agents} agents", asked, rows[own(agents)].median, unit="steps/s") for agents, asked in ASKED.items()
    ]
    claims += [
        Claim(f"{agents} agents / DHC", TIMES_DHC[agents], ratio(rows, own(agents), original(agents)))
        for agents in ASKED
    ]
    return Part(
        "Steps",
        "Density .3, random actions, all observations and communication masks; new maps included as episodes end. A step is "
        "one world's, with all its agents. DHC steps one world and begins no new ones here; its mask is computed with NumPy.",
        "steps/s",
        rows,
        claims,
    )


def maps(effort: Effort) -> Part:
    mine, theirs = "Steppe", "DHC"
    rows = effort.measure(
        [
            workload(mine, "pathfinding", "maps", "--agents", "64", "--times", str(effort.of(1000))),
            peer(theirs, "dhc", "maps", steps=effort.of(10, 2), settings=["agents=64"], value="map_ms"),
        ]
    )
    return Part(
        "A new map",
        "64 agents, density .3: obstacles, starts, goals, and for every agent the ways to its goal from everywhere.",
        "ms",
        rows,
        [Claim("a new map with 64 agents", MAP_MS, rows[mine].median, unit="ms", at_least=False)],
        columns={"worst_ms": "slowest, ms"},
    )


def actor(effort: Effort) -> Part:
    cases = []
    for agents, count in ACTOR_STEPS.items():
        for network, (channels, _) in NETWORKS.items():
            words = ("--agents", str(agents), "--channels", str(channels), "--steps", str(effort.of(count, count // 4)))
            cases.append(workload(f"{own(agents)}, {network}", "acting", *words))
        cases.append(
            peer(original(agents), "dhc", "actor", steps=effort.of(count // 8, 32), settings=[f"agents={agents}"])
        )
    rows = effort.measure(cases)
    claims = [
        Claim(f"{agents} agents, full network", asked, rows[f"{own(agents)}, full network"].median, unit="steps/s")
        for agents, asked in ACTING.items()
    ]
    claims += [
        Claim(f"{agents} agents, {network} / DHC", asked, ratio(rows, f"{own(agents)}, {network}", original(agents)))
        for network, (_, asked) in NETWORKS.items()
        for agents in ACTOR_STEPS
    ]
    return Part(
        "Actors at work",
        "Two actors on two cores, density .3: network, world, and what is kept of every step; nobody learns. A step is one "
        "world's, with all its agents. The full network is DHC's own, 2.0 million parameters in 128 channels; the small one "
        "has 32. Ours act in 16 worlds at once. DHC's actor is run without Ray, which only makes it faster.",
        "steps/s",
        rows,
        claims,
        columns={"agent_steps_per_s": "agents' steps/s"},
    )


def own(agents: int) -> str:
    return f"Steppe, {agents} agents"


def original(agents: int) -> str:
    return f"DHC, {agents} agents"


PARTS = {"steps": steps, "maps": maps, "actor": actor}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))
