"""Deduplicates episodes in actors' reports: an actor that was killed lists some of its episodes again."""

from __future__ import annotations

from steppe.core.contracts.reports import ActorReport


class EpisodeDeduplicator:
    """Finds new episodes in the reports of a run's actors, which must be passed in order."""

    def __init__(self) -> None:
        self._totals: dict[int, int] = {}  # actor → episodes that it has listed, over all of its incarnations

    def new_episodes(self, report: ActorReport) -> list[tuple[float, int]]:
        """Return the episodes that no earlier report listed; the last is the actor's number `total_episodes`."""
        total = report.total_episodes
        if total is None:
            return report.episodes
        before = self._totals.get(report.actor)
        if before is None:
            self._totals[report.actor] = total
            return report.episodes
        self._totals[report.actor] = max(before, total)
        num_known = max(0, len(report.episodes) - max(0, total - before))
        return report.episodes[num_known:]

    def rewind(self) -> None:
        """Handle that the run resumed from an older checkpoint: episodes played again from there are listed again."""
        self._totals.clear()
