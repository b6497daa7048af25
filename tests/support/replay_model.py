"""What a pool of buffers means, in plain Python: lists of (number, priority), oldest first. Slow and obvious."""

from __future__ import annotations

import copy

import numpy as np

EPISODE = 7  # steps of an episode in `images`


class Model:
    """Rows are known by a number that no two of them share."""

    def __init__(self, num_parts: int, capacity: int) -> None:
        self.capacity = capacity
        self.parts: list[list[list[float]]] = [[] for _ in range(num_parts)]
        self.largest = 1.0  # priority ever given
        self.stale = 0
        self.turn = 0

    def add(self, part: int | None, numbers: list[int], priorities: list[float] | None = None) -> None:
        if not numbers:
            return
        if part is None:
            part, self.turn = self.turn, (self.turn + 1) % len(self.parts)
        entering = [self.largest] * len(numbers) if priorities is None else priorities
        self.largest = max([self.largest, *entering])
        for number, priority in zip(numbers, entering, strict=True):
            self.parts[part].append([number, priority])
        del self.parts[part][: -self.capacity]

    def update(self, given: list[tuple[int, bool, float]]) -> None:
        """(number, whether its index is still good if it is there at all, priority) in order."""
        rows = {row[0]: row for part in self.parts for row in part}
        for number, good, priority in given:
            self.largest = max(self.largest, priority)
            if good and number in rows:
                rows[number][1] = priority
            else:
                self.stale += 1

    def clear(self, part: int | None = None) -> None:
        for cleared in range(len(self.parts)) if part is None else [part]:
            self.parts[cleared] = []
        if part is None:
            self.largest, self.turn = 1.0, 0

    def balance(self) -> set[int]:
        """Even out; the numbers of the rows in parts that changed, whose indices are no longer good."""
        sizes = [len(part) for part in self.parts]
        share, rest = divmod(sum(sizes), len(sizes))
        goal = [share] * len(sizes)
        for part in sorted(range(len(sizes)), key=lambda p: -sizes[p])[:rest]:
            goal[part] += 1
        moving, changed = [], set()
        for part, wanted in enumerate(goal):
            surplus = max(0, sizes[part] - wanted)
            moving += self.parts[part][:surplus]
            self.parts[part] = self.parts[part][surplus:]
            if wanted != sizes[part]:
                changed.add(part)
        for part, wanted in enumerate(goal):
            missing = wanted - len(self.parts[part])
            self.parts[part] = moving[:missing] + self.parts[part]
            del moving[:missing]
        return {int(row[0]) for part in changed for row in self.parts[part]}

    def saved(self) -> Model:
        """What a save holds; loading it means going on with a copy of it."""
        return copy.deepcopy(self)

    def numbers(self, part: int) -> list[int]:
        return [int(row[0]) for row in self.parts[part]]

    def priorities(self, part: int) -> list[float]:
        return [row[1] for row in self.parts[part]]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)


def frame(episode: int, time: int) -> np.ndarray:
    """A 16 × 16 image that says where it is from."""
    image = np.zeros((16, 16), np.uint8)
    image[0, :4] = [episode % 251, time, episode // 251, 1]
    image[9] = (episode * 31 + time * 7) % 256
    return image


def images(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Stacks of 4 before and after step `number`; an episode begins with copies of its first frame."""
    episode, time = divmod(number, EPISODE)
    before = np.stack([frame(episode, max(0, time + k)) for k in range(-3, 1)])
    after = np.stack([frame(episode, max(0, time + k)) for k in range(-2, 2)])
    return before, after
