"""What goes in and out through the doors: requests that a stranger may make, and what they are told.

A RunRequest is a RunConfig without what belongs to the machine: paths, devices, modules, addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, create_model

from steppe.core.algorithms import FrozenConfig
from steppe.core.config.run import CheckpointConfig, EnvConfig, EvalConfig, FlowConfig, RunConfig
from steppe.core.config.runtime_table import RUNTIMES

# What a request may say, by name: a new field of the configuration is closed to strangers until it is let in here.
ALLOWED_FIELDS: dict[type[FrozenConfig], tuple[str, ...]] = {
    RunConfig: ("mode", "actors", "envs", "steps", "episodes", "seed", "target_return", "restarts"),
    EnvConfig: (
        *("frame_stack", "time_limit", "reward_clip", "reward_scale", "grayscale", "resize", "vector", "observations"),
    ),
    FlowConfig: (
        *("ahead", "window_s", "max_lag", "max_actors", "slots_per_actor", "publish_every"),
        *("max_restarts", "hang_s", "record_arrivals", "trace_spans"),
    ),
    EvalConfig: (
        "every_steps",
        "every_episodes",
        "episodes",
        "final_episodes",
        "max_share",
        "explore",
        "max_episode_steps",
        "record",
    ),
    CheckpointConfig: ("every_s", "every_episodes", "keep", "keep_best"),
}
ALLOWED_NETWORKS = ("auto", "mlp", "cnn")
RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

RunId = Annotated[str, Field(pattern=RUN_ID)]
Scalar = bool | int | float | str | None | list[int]
State = Literal["PENDING", "STARTING", "RUNNING", "PAUSED", "STOPPING", "SUCCEEDED", "FAILED", "STOPPED", "LOST"]


def _allowed_fields(kind: type[FrozenConfig]) -> dict[str, Any]:
    return {name: (kind.model_fields[name].annotation, kind.model_fields[name]) for name in ALLOWED_FIELDS[kind]}


def _make_section(name: str, kind: type[FrozenConfig], more: Mapping[str, Any] | None = None) -> type[BaseModel]:
    fields = {**_allowed_fields(kind), **(more or {})}
    made: type[BaseModel] = create_model(name, __base__=FrozenConfig, __doc__=kind.__doc__, **fields)
    return made


Argument = Scalar | list[float] | list[str]
_KWARGS: dict[str, Any] = {
    "kwargs": (
        dict[str, Argument],
        Field({}, max_length=30, description="Arguments of the environment's constructor: numbers and plain words."),
    )
}
_SECTIONS = {
    "environment": _make_section("EnvironmentRequest", EnvConfig, _KWARGS),
    "flow": _make_section("FlowRequest", FlowConfig),
    "evaluation": _make_section("EvaluationRequest", EvalConfig),
    "checkpoint": _make_section("CheckpointRequest", CheckpointConfig),
}

if TYPE_CHECKING:

    class RunRequest(BaseModel):
        """Made below from the fields of RunConfig."""

        env: str
        start: bool
else:
    RunRequest = create_model(
        "RunRequest",
        __base__=FrozenConfig,
        __doc__="One experiment. Environment and algorithm are names from the lists that the service gives.",
        **{
            **_allowed_fields(RunConfig),
            "env": (str, Field(max_length=200, description="An id from the list of environments.")),
            "algo": (str, Field("ppo", max_length=100, description="A name from the list of algorithms.")),
            "name": (
                str | None,
                Field(None, pattern=RUN_ID, description="Name of the run, which is its id; one is made if absent."),
            ),
            "runtime": (
                Literal[*RUNTIMES] | None,
                Field(
                    None,
                    description=f"Where the roles run: {', '.join(RUNTIMES)}; `runtimes` of the version says which of them this service has. "
                    "If absent, kafka where the service has brokers (but for mode workers) and else processes.",
                ),
            ),
            "start": (bool, Field(True, description="Start it at once.")),
            "agent": (
                dict[str, Scalar],
                Field({}, max_length=100, description="Hyperparameters by name, as the algorithm's list has them."),
            ),
            **{name: (kind, Field(kind(), description=kind.__doc__)) for name, kind in _SECTIONS.items()},
        },
    )


def to_settings(request: RunRequest) -> dict[str, Any]:
    """The flat dotted keys that a request decides."""
    flat: dict[str, Any] = {}
    for key, value in request.model_dump(exclude_unset=True).items():
        if key == "start":
            continue
        nested = key == "agent" or key in _SECTIONS
        flat.update({f"{key}.{name}": inner for name, inner in value.items()} if nested else {key: value})
    return {key: value for key, value in flat.items() if value is not None}


class ResponseModel(BaseModel):
    """What every answer is: complete, and nothing else in it."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class FieldError(ResponseModel):
    """What is wrong with one field."""

    field: str
    detail: str


class Problem(ResponseModel):
    """An error as RFC 9457 has it; `code` is a short word for machines."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[FieldError] = Field(
        [], description="Of a request that is not valid, everything that is wrong with it."
    )


class RunProgress(ResponseModel):
    """How far a run is; null is what is not known yet."""

    env_steps: int = 0
    total_steps: int | None = None
    updates: int = 0
    version: int = 0
    train_return_mean: float | None = None
    eval_return_mean: float | None = None
    steps_per_s: float | None = None
    episodes: int | None = None


class Run(ResponseModel):
    """A run: what is wanted of it beside what is seen of it."""

    id: str
    state: State
    reason: str | None
    message: str | None
    desired: Literal["waiting", "running", "paused", "stopped"]
    generation: int = Field(description="Grows with every accepted change; for If-Match.")
    env: str
    algo: str
    created_s: float
    started_s: float | None = None
    heartbeat_s: float | None = None
    operation: str | None = Field(None, description="The newest operation on this run.")
    progress: RunProgress
    damage: str | None = Field(None, description="What of the run cannot be read, if anything.")


class RunDetail(Run):
    """A run with its configuration, and where each value came from."""

    config: dict[str, JsonValue]
    sources: dict[str, str]


class Runs(ResponseModel):
    """Newest first; `next` is the cursor to ask with for the rest, null when that was all."""

    runs: list[Run]
    next: str | None = None


class Operation(ResponseModel):
    """A change under way: it has succeeded when whoever carries it out has said so."""

    id: str
    kind: str
    run: str
    state: Literal["pending", "succeeded", "failed"]
    message: str | None = None
    issuer: str
    created_s: float
    finished_s: float | None = None
    settled_by: Literal["run", "cluster"] = Field(
        "run", description="Who shows that it is done: the run, in its reports, or the cluster, in its pods."
    )
    details: dict[str, JsonValue] = {}


class Operations(ResponseModel):
    """Newest first."""

    operations: list[Operation]
    next: str | None = Field(None, description="The cursor for the rest; null when that was all.")


class ActorState(ResponseModel):
    """One actor as it last reported."""

    actor: int
    state: str
    epoch: int = Field(description="How often it has been started again.")
    version: int
    env_steps: int
    report_age_s: float
    rss_bytes: int | None


class Actors(ResponseModel):
    """Wanted and seen."""

    desired: int
    ready: int
    most: int = Field(description="How many there is room for; 0 where the number cannot change while the run goes on.")
    actors: list[ActorState]


class LearnerStatus(ResponseModel):
    """Wanted and seen."""

    desired: Literal[0, 1]
    ready: Literal[0, 1]
    version: int
    updates: int


class ActorCount(FrozenConfig):
    """How many actors are wanted."""

    actors: Annotated[int, Field(ge=0, le=1_000)]


class LearnerCount(FrozenConfig):
    """0 stops the run with a checkpoint, 1 lets it go on from there."""

    learner: Literal[0, 1]


class Hyperparameter(ResponseModel):
    """One setting of the algorithm: its range, its value, and when a change of it takes effect."""

    name: str
    description: str
    schema_: dict[str, JsonValue] = Field(alias="schema", description="JSON Schema with the range.")
    value: JsonValue
    effect: Literal["live", "restart", "fixed"] = Field(
        description="A change takes effect with the next update, on restart (when the run is stopped and started again), "
        "or never in this run."
    )


class Hyperparameters(ResponseModel):
    algo: str
    hyperparameters: list[Hyperparameter]


class HyperparameterChange(FrozenConfig):
    """New values by name. With `dry_run` nothing changes, and the answer says what would."""

    values: dict[str, Scalar] = Field(min_length=1, max_length=100)
    dry_run: bool = False


class Effect(ResponseModel):
    name: str
    before: JsonValue
    after: JsonValue
    effect: Literal["takes effect with the next update", "takes effect on restart"]


class Effects(ResponseModel):
    """What a change does; `operation` is null for a dry run."""

    effects: list[Effect]
    operation: Operation | None


class Series(ResponseModel):
    """Points [env_steps, time_s, value], oldest first; null is a value that was not finite."""

    name: str
    points: list[tuple[int, float, float | None]]
    total: int = Field(description="Points there are since the cursor, before downsampling.")


class Metrics(ResponseModel):
    """`next` is the cursor to ask with for what comes after."""

    series: list[Series]
    names: list[str] = Field(description="Every series that the run has.")
    next: int


class Logs(ResponseModel):
    """Whole lines of one role's output; `next` is the cursor to ask with for what comes after. Untrusted text."""

    source: str | None
    sources: list[str]
    lines: list[str]
    next: int


class Event(ResponseModel):
    number: int
    time_s: float
    kind: str
    role: str
    details: dict[str, JsonValue]


class Events(ResponseModel):
    events: list[Event]
    next: int


class CheckpointState(ResponseModel):
    number: int
    best: bool
    age_s: float
    size_bytes: int
    env_steps: int | None
    updates: int | None
    version: int | None
    score: float | None
    damage: str | None


class CheckpointList(ResponseModel):
    checkpoints: list[CheckpointState]
    next: str | None = Field(None, description="The cursor for the rest; null when that was all.")


class Judgement(ResponseModel):
    number: int
    time_s: float
    version: int
    env_steps: int
    episodes: int
    return_mean: float | None
    return_std: float | None
    reached: bool
    final: bool
    recording: str | None = Field(None, description="Name of the film of one episode, where one was kept.")


class Evaluations(ResponseModel):
    evaluations: list[Judgement]
    next: int


class Environment(ResponseModel):
    id: str
    max_episode_steps: int | None
    solved_at: float | None
    native_vector: bool
    needs: str | None = Field(description="A package that is missing on this machine.")


class Environments(ResponseModel):
    environments: list[Environment]
    next: str | None = Field(None, description="The cursor for the rest; null when that was all.")


class Algorithm(ResponseModel):
    name: str
    summary: str
    actions: list[str]
    memory: str
    hyperparameters: list[Hyperparameter]


class Algorithms(ResponseModel):
    algorithms: list[Algorithm]
    next: str | None = Field(None, description="The cursor for the rest; null when that was all.")


class Finding(ResponseModel):
    """What holds a run back, in one sentence, and the numbers that were measured: shares of time, cores, actors."""

    window_s: float | None = Field(description="How far back it was measured; null for the whole run.")
    window: str = Field(description="The same in words.")
    rule: str
    sentence: str
    numbers: dict[str, float]
    shares: dict[str, dict[str, float]] = Field(description="Role → phase → its part of the role's time.")
    lags: dict[str, int] = Field(description="Versions that a segment was behind when learned from → segments.")


class Version(ResponseModel):
    version: str
    api: str
    broker: str
    runtimes: list[str] = Field(description="Where roles can live here.")


class Health(ResponseModel):
    status: Literal["ok", "unavailable"]
    detail: str | None = None


class AuditEntry(ResponseModel):
    time_s: float
    who: str
    scope: str
    operation: str
    run: str | None
    outcome: str


class Audit(ResponseModel):
    entries: list[AuditEntry]
    next: str | None = Field(None, description="The cursor for the rest; null when that was all.")
