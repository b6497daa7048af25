"""Pathfinding worlds of 40 × 40 cells on one core: steps with observations and masks, and new maps, beside DHC's own."""

from __future__ import annotations

from suite.claims import Claim, ratio
from suite.ours import workload
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

ASKED = {4: 400_000, 16: 100_000, 64: 15_000}
TIMES_DHC = {4: 90, 16: 50, 64: 30}  # the same, whatever the machine
WORLDS = 64
MAP_MS = 5.0


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


def own(agents: int) -> str:
    return f"Steppe, {agents} agents"


def original(agents: int) -> str:
    return f"DHC, {agents} agents"


PARTS = {"steps": steps, "maps": maps}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))
