"""What limits a run's speed: a small table of rules on measured time shares. The first that applies is reported.

docs/performance-of-your-run.md explains the rules; `measure_time_shares` computes the shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steppe.core.config.run import RunConfig
from steppe.core.config.runtime_table import capabilities_of
from steppe.records.phase_times import TimeTotals
from steppe.records.view import RunView, time_shares_of

MIN_MEASURED_S = 2.0  # of measured time; below that, start-up dominates
# Shares from which a part takes too much.
MAX_DROPPED_SHARE, MAX_CHECKPOINT_SHARE, MAX_EVALUATION_SHARE = 0.10, 0.10, 0.20
MAX_WAITING_SHARE, MAX_BLOCKED_SHARE = 0.30, 0.30  # if acting and learning overlap: from here on one side starves
DOMINANT_SHARE = 0.60  # if they take turns: from here on one side is the slower one
FULL_CORE_SHARE = 0.90  # of all cores
MAX_MERGE_SHARE = 0.20  # workers: from here on merges take too much
MAX_WORKER_WAITING_SHARE = 0.30  # gradient workers: from here on they wait too long


@dataclass(frozen=True)
class TimeShares:
    """Shares of time, 0 to 1. Those of actors are means over actors."""

    seconds: float
    # actors
    env: float = 0.0
    policy: float = 0.0
    blocked: float = 0.0
    sending: float = 0.0  # everything else: sending segments, reports
    merge: float = 0.0  # workers: waiting for the table and merging into it
    gradients: float = 0.0  # gradient workers: computing gradients
    # learner
    waits: float = 0.0  # for segments; if it shares its thread with the actors, acting's share of the two
    sample: float = 0.0
    learn: float = 0.0
    publish: float = 0.0
    checkpoints: float = 0.0
    # the rest
    evaluation: float = 0.0  # of training time
    dropped: float = 0.0  # of all segments, because they were too old
    refused: float = 0.0  # of all segments, because of invalid values
    busy: float = 1.0  # average number of roles working at the same time
    used_cores: float | None = None
    cores: int = 1
    actors: int = 1
    mode: str = "sync"
    ahead: bool = False  # sync: whether actors collect the next round while the learner learns from the last
    inline: bool = False
    epochs: bool = True  # whether the algorithm makes passes over rollouts, or samples from replay

    @property
    def alternating(self) -> bool:
        """Whether acting and learning take turns in one thread."""
        return self.inline or self.mode == "single"

    @property
    def overlapping(self) -> bool:
        """Whether acting and learning overlap."""
        return not self.alternating and (self.mode == "async" or self.ahead)

    @property
    def uses_all_cores(self) -> bool:
        """Whether the run uses all available cores."""
        return self.used_cores is not None and self.used_cores >= FULL_CORE_SHARE * self.cores

    @property
    def starving(self) -> bool:
        """Whether acting is the slower side."""
        return self.waits >= (MAX_WAITING_SHARE if self.overlapping else DOMINANT_SHARE)

    @property
    def flooded(self) -> bool:
        """Whether learning is the slower side."""
        return self.blocked >= MAX_BLOCKED_SHARE if self.overlapping else self.waits <= 1 - DOMINANT_SHARE


@dataclass(frozen=True)
class Rule:
    """A possible bottleneck: when it applies, and its explanation."""

    name: str
    applies: Callable[[TimeShares], bool]
    explain: Callable[[TimeShares], str]


@dataclass(frozen=True)
class Diagnosis:
    """The rule that applied, and its explanation."""

    rule: str
    sentence: str


def diagnose(measured: TimeShares) -> Diagnosis:
    """Return the diagnosis of the first rule that applies."""
    rule = next(rule for rule in RULES if rule.applies(measured))
    return Diagnosis(rule.name, rule.explain(measured))


def measure_time_shares(view: RunView, spent: TimeTotals | None = None) -> TimeShares:
    """Compute time shares over all of the run's attempts, or of `spent`, for example `view.lately`."""
    spent, config = spent or view.totals, view.config
    shares, phases = time_shares_of(spent.phases), spent.phases
    actor, learner = shares.get("actor", {}), shares.get("learner", {})
    seconds = sum(phases.get("learner", {}).values())
    inline = capabilities_of(config.runtime).one_process
    alternating = inline or config.mode == "single"
    evaluation_share = spent.evaluation_s / seconds if seconds else 0.0
    actors = [used for role, used in phases.items() if role.startswith("actor-")]
    acting = sum(1.0 - _share(used, "blocked") for used in actors)
    learning, waits = 1.0 - learner.get("wait", 0.0), learner.get("wait", 0.0)
    if alternating:
        waits = acting / (acting + learning) if acting + learning else 0.0
    return TimeShares(
        seconds=seconds,
        env=actor.get("env", 0.0),
        policy=actor.get("policy", 0.0),
        blocked=actor.get("blocked", 0.0),
        sending=actor.get("other", 0.0),
        merge=actor.get("merge", 0.0),
        gradients=actor.get("learn", 0.0),
        waits=waits,
        sample=learner.get("sample", 0.0) + learner.get("remember", 0.0),
        learn=learner.get("learn", 0.0),
        publish=learner.get("publish", 0.0),
        checkpoints=spent.checkpoint_s / seconds if seconds else 0.0,
        evaluation=evaluation_share,
        dropped=_dropped(spent),
        refused=spent.refused / max(1, sum(spent.lags.values())),
        busy=1.0 if inline else (1.0 if alternating else acting + learning) + evaluation_share,
        used_cores=_used_cores(config, spent, seconds, evaluation_share),
        cores=int(view.directory.record.get("hardware", {}).get("usable_cores") or 1),
        actors=sum(sum(used.values()) > 0 for used in actors) or config.actors,
        mode="gradients" if config.by_gradients else str(config.mode),
        ahead=bool(config.flow.ahead),
        inline=inline,
        epochs=config.agent.memory == "rollout",
    )


def _share(phases: dict[str, float], phase: str) -> float:
    total = sum(phases.values())
    return phases.get(phase, 0.0) / total if total else 1.0


def _dropped(spent: TimeTotals) -> float:
    return spent.too_old / (spent.too_old + sum(spent.lags.values())) if spent.too_old else 0.0


def _used_cores(config: RunConfig, spent: TimeTotals, seconds: float, evaluation_share: float) -> float | None:
    """Return CPU time in cores. Roles of one process report the same value; the manager's is its evaluation time."""
    used = spent.cpu_s
    if capabilities_of(config.runtime).one_process:
        return 1.0  # other work of its process cannot be told apart
    if not used or not seconds:
        return None
    return (max(used.values()) if config.mode == "single" else sum(used.values())) / seconds + evaluation_share


def format_percent(share: float) -> str:
    """Format a share as a whole percentage."""
    return f"{100 * share:.0f} %"


def _waiting(m: TimeShares) -> str:
    return "" if m.alternating else f"the learner waits {format_percent(m.waits)} for experience, and "


def _env(m: TimeShares) -> str:
    part = f"{_waiting(m)}the environment takes {format_percent(m.env)} of the actors' time: "
    if m.uses_all_cores:
        return part + f"a faster environment or more cores, as the run already uses all {m.cores} of them"
    if m.inline:
        return part + "more actors in processes of their own (--runtime processes --actors N), or a faster environment"
    return part + "more actors (--actors), or a faster environment"


def _policy(m: TimeShares) -> str:
    return (
        f"{_waiting(m)}choosing actions takes {format_percent(m.policy)} of the actors' time: more environments per actor (--envs), "
        "so that one call serves more of them, or a smaller network"
    )


def _sending(m: TimeShares) -> str:
    part = f"{_waiting(m)}sending segments takes {format_percent(m.sending)} of the actors' time: "
    return part + "longer segments (segment_steps)"


def _learn(m: TimeShares) -> str:
    remedy = (
        "fewer epochs, a larger minibatch_size"
        if m.epochs
        else "fewer updates (samples_per_insert), a larger batch_size"
    )
    why = f"the learner learns {format_percent(m.learn)} of its time"
    if m.alternating:
        return f"{why}, and acting waits for it: {remedy}, or a smaller network"
    fewer = ", or fewer actors" if m.mode == "async" and m.actors > 1 else ", or a smaller network"
    return f"the actors are blocked {format_percent(m.blocked)} because {why}: {remedy}{fewer}"


def _turns(m: TimeShares) -> str:
    halves = f"acting takes {format_percent(m.waits)} of a round and learning {format_percent(1 - m.waits)}"
    remedy = (
        "flow.ahead=1 or --mode async" if m.mode == "sync" and not m.inline else "--mode sync or async in processes"
    )
    return f"acting and learning wait for each other: {halves}: {remedy}, where both run at once"


def _balanced(m: TimeShares) -> str:
    return (
        f"nothing stands out: the learner waits {format_percent(m.waits)}, the actors are blocked {format_percent(m.blocked)}; "
        "more speed takes more cores, a faster environment or less learning per step"
    )


def _workers(m: TimeShares) -> str:
    if m.merge >= MAX_MERGE_SHARE:
        return f"merging takes {format_percent(m.merge)} of the workers' time: longer stretches between merges (segment_steps)"
    more = (
        f"as the run already uses all {m.cores} cores"
        if m.uses_all_cores or m.actors >= m.cores
        else "or more workers (--actors)"
    )
    return f"the workers are never held up, and merge for {format_percent(m.merge)} of their time: a faster environment, {more}"


def _gradients(m: TimeShares) -> str:
    if m.blocked >= MAX_WORKER_WAITING_SHARE:
        awaited = "for each other or for the learner"
        return f"the workers wait for {format_percent(m.blocked)} of their time, {awaited}: longer stretches between pushes (segment_steps)"
    shares = {"the environment": m.env, "choosing actions": m.policy, "computing gradients": m.gradients}
    most = max(shares, key=lambda name: shares[name])
    more = (
        f"the run already uses all {m.cores} cores"
        if m.uses_all_cores or m.actors >= m.cores
        else "more workers (--actors) help"
    )
    return f"{most} takes {format_percent(shares[most])} of the workers' time: {more}"


RULES: tuple[Rule, ...] = (
    Rule(
        "refused",
        lambda m: m.refused > 0,
        lambda m: (
            f"{format_percent(m.refused)} of the segments were refused, because their values cannot be learned from: the warnings in "
            "the event log name the actor and the value; fix that policy or environment"
        ),
    ),
    Rule(
        "too_short",
        lambda m: m.seconds < MIN_MEASURED_S,
        lambda m: (
            f"too short to judge: {m.seconds:.1f} s were measured, and it takes {MIN_MEASURED_S:g} s of training to tell"
        ),
    ),
    Rule(
        "dropped",
        lambda m: m.dropped >= MAX_DROPPED_SHARE,
        lambda m: (
            f"{format_percent(m.dropped)} of the segments were dropped for lag, collected for nothing: fewer actors, less learning "
            "per step, or a larger flow.max_lag"
        ),
    ),
    Rule(
        "checkpoints",
        lambda m: m.checkpoints >= MAX_CHECKPOINT_SHARE,
        lambda m: (
            f"checkpoints take {format_percent(m.checkpoints)} of the learner's time: fewer of them (checkpoint.every_s)"
        ),
    ),
    Rule(
        "evaluation",
        lambda m: m.evaluation >= MAX_EVALUATION_SHARE and (m.inline or (m.uses_all_cores and m.busy > m.cores)),
        lambda m: (
            f"evaluation takes {format_percent(m.evaluation)} of "
            + ("the one thread's time" if m.inline else f"a core, and the run uses all {m.cores}")
            + ": a smaller evaluation.max_share, or fewer evaluation.episodes"
            + (", or use --runtime processes" if m.inline else "")
        ),
    ),
    Rule(
        "crowded",
        lambda m: m.uses_all_cores and m.actors > 1 and not m.alternating and m.busy > m.cores + 0.5,
        lambda m: (
            f"more roles than cores: {m.busy:.1f} busy roles on {m.cores} cores: fewer actors with more environments each "
            "(--actors, --envs)"
        ),
    ),
    Rule("workers", lambda m: m.mode == "workers", _workers),
    Rule("gradients", lambda m: m.mode == "gradients", _gradients),
    Rule("environment", lambda m: m.starving and m.env >= max(m.policy, m.sending), _env),
    Rule("policy", lambda m: m.starving and m.policy >= m.sending, _policy),
    Rule("handing_over", lambda m: m.starving, _sending),
    Rule(
        "sampling",
        lambda m: m.flooded and m.sample > m.learn,
        lambda m: (
            f"the learner spends {format_percent(m.sample)} of its time on gathering batches: larger batches, of which it takes fewer"
        ),
    ),
    Rule(
        "publishing",
        lambda m: m.flooded and m.publish > m.learn,
        lambda m: (
            f"publishing weights takes {format_percent(m.publish)} of the learner's time: more learning per version"
        ),
    ),
    Rule("learner", lambda m: m.flooded, _learn),
    Rule("turns", lambda m: not m.overlapping and m.cores > 1, _turns),
    Rule("balanced", lambda m: True, _balanced),
)
