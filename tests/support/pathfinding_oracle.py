"""A slow pathfinding world, written from the rules alone: cells are (row, column), everything is looked up and compared.

Conflicts are settled literally, round after round; `met` counts what kinds there were.
"""

from collections import Counter, deque

import numpy as np

MOVES = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]  # stay, up, down, left, right
MOVE = WAIT_OFF_GOAL = -0.075
WAIT_ON_GOAL, COLLISION, FINISH = 0.0, -0.5, 3.0


def distances(free, goal):
    """Steps from each cell that can reach the goal."""
    found, queue = {goal: 0}, deque([goal])
    while queue:
        row, column = queue.popleft()
        for down, right in MOVES[1:]:
            there = (row + down, column + right)
            if there in free and there not in found:
                found[there] = found[row, column] + 1
                queue.append(there)
    return found


class SlowWorld:
    def __init__(self, obstacles, starts, goals, radius=4):
        self.height, self.width = obstacles.shape
        self.obstacles = np.array(obstacles, bool)
        self.free = {(row, column) for row, column in np.argwhere(~self.obstacles).tolist()}
        self.at = [tuple(cell) for cell in np.asarray(starts).tolist()]
        self.goals = [tuple(cell) for cell in np.asarray(goals).tolist()]
        self.radius = radius
        self.steps = 0
        self.met = Counter()
        self.distances = [distances(self.free, goal) for goal in self.goals]
        self.guides = [self.guide(known) for known in self.distances]

    def guide(self, known):
        """Four planes with a margin of zeros: where each move lowers the distance."""
        planes = np.zeros((4, self.height, self.width), bool)
        for (row, column), distance in known.items():
            for plane, (down, right) in enumerate(MOVES[1:]):
                neighbour = known.get((row + down, column + right))
                planes[plane, row, column] = neighbour is not None and neighbour < distance
        return np.pad(planes, ((0, 0), (self.radius, self.radius), (self.radius, self.radius)))

    def step(self, actions):
        """(rewards, everyone is at its goal)."""
        agents = range(len(self.at))
        wanted = [(r + MOVES[a][0], c + MOVES[a][1]) for (r, c), a in zip(self.at, actions, strict=True)]
        reverted = set()

        def revert(agent, why):
            wanted[agent] = self.at[agent]
            reverted.add(agent)
            self.met[why] += 1

        for agent in agents:
            if wanted[agent] not in self.free:
                revert(agent, "blocked")
        standing_at = {cell: agent for agent, cell in enumerate(self.at)}
        pairs = [(agent, standing_at.get(cell, agent)) for agent, cell in enumerate(wanted)]
        swapping = [(one, other) for one, other in pairs if one < other and wanted[other] == self.at[one]]
        for pair in swapping:
            for agent in pair:
                revert(agent, "swap")
        changed, rounds = True, 0
        while changed:
            changed = False
            rounds += 1
            for cell, claims in Counter(wanted).items():
                if claims < 2:
                    continue
                claimants = [agent for agent in agents if wanted[agent] == cell]
                standing = [agent for agent in claimants if self.at[agent] == cell]
                keeps = standing[0] if standing else min(claimants)
                for agent in claimants:
                    if agent != keeps:
                        revert(agent, "stood on" if standing else "crowd")
                        self.met["chain"] += rounds > 2
                        changed = True
        rewards = [self.reward(agent, actions[agent], agent in reverted) for agent in agents]
        before = set(self.at)
        self.met["followed"] += sum(wanted[a] in before and wanted[a] != self.at[a] for a in agents)
        self.at = wanted
        self.steps += 1
        assert len(set(self.at)) == len(self.at)
        if self.at == self.goals:
            return [FINISH] * len(self.at), True
        return rewards, False

    def reward(self, agent, action, reverted):
        if reverted:
            return COLLISION
        if action != 0:
            return MOVE
        return WAIT_ON_GOAL if self.at[agent] == self.goals[agent] else WAIT_OFF_GOAL

    def observe(self):
        """bool [N, 6, view, view]."""
        reach, view = self.radius, 2 * self.radius + 1
        planes = np.zeros((len(self.at), 6, view, view), bool)
        others = np.zeros((self.height, self.width), bool)
        for cell in self.at:
            others[cell] = True
        others, walls = np.pad(others, reach), np.pad(self.obstacles, reach)
        for agent, (row, column) in enumerate(self.at):
            window = (..., slice(row, row + view), slice(column, column + view))
            planes[agent, 0] = others[window]
            planes[agent, 0, reach, reach] = False
            planes[agent, 1] = walls[window]
            planes[agent, 2:] = self.guides[agent][window]
        return planes

    def hears(self):
        """bool [N, N]: within the view and among the three nearest, oneself included, ties by id."""
        mask = np.zeros((len(self.at), len(self.at)), bool)
        places = np.array(self.at)
        for agent, (row, column) in enumerate(self.at):
            away = np.hypot(places[:, 0] - row, places[:, 1] - column)
            nearest = np.argsort(np.round(away, 9), kind="stable")[:3]
            for other in nearest.tolist():
                down, right = abs(places[other] - places[agent])
                mask[agent, other] = down <= self.radius and right <= self.radius
        return mask
