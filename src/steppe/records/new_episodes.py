"""Which of the episodes that actors list in their reports are new: one that was killed lists some of them again."""

from __future__ import annotations

from steppe.core.contracts.reports import ActorReport


class EpisodeDeduplicator:
    """Takes the reports of a run's actors in order."""

    def __init__(self) -> None:
        self._totals: dict[int, int] = {}  # actor → episodes that it has listed, over all of its lives

    def take(self, report: ActorReport) -> list[tuple[float, int]]:
        """The episodes of a report that were in none before. Its last one is the actor's episode number `total_episodes`."""
        total = report.total_episodes
        if total is None:
            return report.episodes
        before = self._totals.get(report.actor)
        if before is None:
            self._totals[report.actor] = total
            return report.episodes
        self._totals[report.actor] = max(before, total)
        known = max(0, len(report.episodes) - max(0, total - before))
        return report.episodes[known:]

    def rewind(self) -> None:
        """The run goes on from an older checkpoint: what is played again from there is listed again."""
        self._totals.clear()
