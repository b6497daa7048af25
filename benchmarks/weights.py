"""Weights of 5 MB: from publication to every reader, and into the actors' next segments."""

from __future__ import annotations

from suite.claims import Claim
from suite.ours import Figures, Finished, train, workload
from suite.report import Part
from suite.running import Effort, benchmark

MEGABYTE, READERS = 1_000_000, 2
VISIBLE_MS = 4.0


def visible(effort: Effort) -> Part:
    words = ("--nbytes", str(5 * MEGABYTE), "--readers", str(READERS), "--times", str(effort.of(200, 20)))
    rows = effort.measure([workload("Steppe, shared memory", "publishing", *words)])
    return Part(
        "Publish → visible to `newer_than`",
        "A writer publishes 5 MB every 20 ms; two readers in processes of their own wake, call `newer_than` and have their "
        "copy. A publication counts when the slower of the two has it.",
        "ms",
        rows,
        [
            Claim(
                "5 MB of weights, publish → visible to both of 2 readers, median",
                VISIBLE_MS,
                rows["Steppe, shared memory"].median,
                unit="ms",
                at_least=False,
            )
        ],
        columns={
            "single_ms": "one reader, ms",
            "worst_ms": "slowest publication, ms",
            "publish_ms": "publish itself, ms",
        },
    )


def adoption(run: Finished) -> Figures:
    """Share of (publication, actor) pairs that the actor adopted in its first segment that began VISIBLE_MS later."""
    spans = run.spans()
    published = [(span.end_s, span.version) for span in spans if span.phase == "publish"]
    by_actor: dict[str, list[tuple[float, int | None]]] = {}
    for span in spans:
        if span.phase == "collect":
            by_actor.setdefault(span.role, []).append((span.start_s, span.version))
    pairs = adopted = 0
    for at, version in published:
        for segments in by_actor.values():
            later = [used for start, used in segments if start >= at + VISIBLE_MS / 1000]
            if later:
                pairs += 1
                adopted += (later[0] or 0) >= (version or 0)
    megabytes = sum(path.stat().st_size for path in run.view.directory.path.glob("weights.safetensors")) / MEGABYTE
    return {"value": 100 * adopted / pairs if pairs else float("nan"), "pairs": pairs, "megabytes": megabytes}


def adopted(effort: Effort) -> Part:
    own = "Steppe, 2 actors, async"
    words = ("--mode", "async", "--actors", "2", "--envs", "8", "--steps", str(effort.of(60_000, 12_000)))
    sized = ("-s", "hidden=[768, 768]", "-s", "flow.trace_spans=2000", "-s", "evaluation.every_steps=1000000")
    rows = effort.measure([train(own, "CartPole-v1", *words, *sized, figures=adoption)])
    return Part(
        "Adopted at the next segment",
        f"A run with two layers of 768 (5 MB of weights): for every publication and every actor, whether the first segment "
        f"that began at least {VISIBLE_MS:g} ms later was collected with these weights or newer ones.",
        "% adopted",
        rows,
        [Claim("5 MB of weights, adopted by every actor at its next segment", 100, rows[own].median, unit="%")],
        columns={"pairs": "publications × actors", "megabytes": "weights, MB"},
    )


PARTS = {"visible": visible, "adopted": adopted}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))
