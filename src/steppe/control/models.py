"""Request and response models of the API.

A RunRequest has the fields of a RunConfig, except those that concern this machine: paths, devices, modules, addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, create_model

from steppe.core.config.fields import FrozenConfig
from steppe.core.config.run import CheckpointConfig, EnvConfig, EvalConfig, FlowConfig, RunConfig
from steppe.core.config.runtime_table import RUNTIMES

# Configuration fields that a request may set. A new field is not accepted until it is listed here.
ALLOWED_FIELDS: dict[type[FrozenConfig], tuple[str, ...]] = {
    RunConfig: ("mode", "actors", "envs", "steps", "episodes", "seed", "target_return", "restarts"),
    EnvConfig: (
        *("frame_stack", "time_limit", "reward_clip", "reward_scale", "grayscale", "resize", "vector", "observations"),
    ),
    FlowConfig: (
        *("ahead", "window_s", "max_lag", "max_actors", "slots_per_actor", "publish_every"),
        *("max_restarts", "hang_s", "record_arrivals", "trace_spans"),
    ),
    EvalConfig: ("every_steps", "every_episodes", "episodes", "max_share", "explore", "max_episode_steps", "record"),
    CheckpointConfig: ("every_s", "every_episodes", "keep"),
}
ALLOWED_NETWORKS = ("auto", "mlp", "cnn")
RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

RunId = Annotated[str, Field(pattern=RUN_ID)]
Scalar = bool | int | float | str | None | list[int]
State = Literal["PENDING", "STARTING", "RUNNING", "PAUSED", "STOPPING", "SUCCEEDED", "FAILED", "STOPPED", "LOST"]


def _allowed_fields(kind: type[FrozenConfig]) -> dict[str, Any]:
    return {name: (kind.model_fields[name].annotation, kind.model_fields[name]) for name in ALLOWED_FIELDS[kind]}


def _make_section(name: str, kind: type[FrozenConfig], extra: Mapping[str, Any] | None = None) -> type[BaseModel]:
    fields = {**_allowed_fields(kind), **(extra or {})}
    model: type[BaseModel] = create_model(name, __base__=FrozenConfig, __doc__=kind.__doc__, **fields)
    return model


Argument = Scalar | list[float] | list[str]
_KWARGS: dict[str, Any] = {
    "kwargs": (
        dict[str, Argument],
        Field(
            {},
            max_length=30,
            description="Keyword arguments for the environment's constructor: numbers, strings, or lists of them.",
        ),
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
        """Created below from the fields of RunConfig."""

        env: str
        start: bool
else:
    RunRequest = create_model(
        "RunRequest",
        __base__=FrozenConfig,
        __doc__="Configuration of a new run. list_environments and list_algorithms return the accepted names.",
        **{
            **_allowed_fields(RunConfig),
            "env": (str, Field(max_length=200, description="Id of an environment, as in list_environments.")),
            "algo": (str, Field("ppo", max_length=100, description="Name of an algorithm, as in list_algorithms.")),
            "name": (
                str | None,
                Field(None, pattern=RUN_ID, description="Name of the run, which is also its id. Default: generated."),
            ),
            "runtime": (
                Literal[*RUNTIMES] | None,
                Field(
                    None,
                    description=f"Where the roles run: {', '.join(RUNTIMES)}; get_version lists those that are available. "
                    "Default: kafka if the service has brokers and the mode is not workers, otherwise processes.",
                ),
            ),
            "start": (bool, Field(True, description="Start the run immediately.")),
            "agent": (
                dict[str, Scalar],
                Field({}, max_length=100, description="Hyperparameters by name, as in list_algorithms."),
            ),
            **{name: (kind, Field(kind(), description=kind.__doc__)) for name, kind in _SECTIONS.items()},
        },
    )


def to_settings(request: RunRequest) -> dict[str, Any]:
    """Return the configuration keys that a request sets, flat and dotted."""
    flat: dict[str, Any] = {}
    for key, value in request.model_dump(exclude_unset=True).items():
        if key == "start":
            continue
        nested = key == "agent" or key in _SECTIONS
        flat.update({f"{key}.{name}": inner for name, inner in value.items()} if nested else {key: value})
    return {key: value for key, value in flat.items() if value is not None}


class ResponseModel(BaseModel):
    """Base class of responses: no fields other than the declared ones."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class FieldError(ResponseModel):
    """A validation error of one field."""

    field: str
    detail: str


class Problem(ResponseModel):
    """An error as defined by RFC 9457; `code` is a machine-readable identifier."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[FieldError] = Field([], description="All validation errors of an invalid request.")


class RunProgress(ResponseModel):
    """Progress of a run; values that are not known yet are null."""

    env_steps: int = 0
    total_steps: int | None = None
    updates: int = 0
    version: int = 0
    train_return_mean: float | None = None
    eval_return_mean: float | None = None
    steps_per_s: float | None = None
    episodes: int | None = None


class Run(ResponseModel):
    """A run: its desired and its observed state."""

    id: str
    state: State
    reason: str | None
    message: str | None
    desired: Literal["waiting", "running", "paused", "stopped"]
    generation: int = Field(description="Increases with every accepted change; use it in If-Match.")
    env: str
    algo: str
    created_s: float
    started_s: float | None = None
    heartbeat_s: float | None = None
    operation: str | None = Field(None, description="Id of the newest operation on this run.")
    progress: RunProgress
    damage: str | None = Field(None, description="What part of the run cannot be read, if any.")


class RunDetail(Run):
    """A run with its configuration and the source of each value."""

    config: dict[str, JsonValue]
    sources: dict[str, str]


class Runs(ResponseModel):
    """Runs, newest first; `next` is the cursor of the next page, null on the last page."""

    runs: list[Run]
    next: str | None = None


class Operation(ResponseModel):
    """A requested change. It has succeeded once the run or the cluster has confirmed it."""

    id: str
    kind: str
    run: str
    state: Literal["pending", "succeeded", "failed"]
    message: str | None = None
    issuer: str
    created_s: float
    finished_s: float | None = None
    settled_by: Literal["run", "cluster"] = Field(
        "run", description="What confirms the outcome: the run, by its reports, or the cluster, by its pods."
    )
    details: dict[str, JsonValue] = {}


class Operations(ResponseModel):
    """Operations, newest first."""

    operations: list[Operation]
    next: str | None = Field(None, description="Cursor of the next page; null on the last page.")


class ActorState(ResponseModel):
    """The last reported state of one actor."""

    actor: int
    state: str
    epoch: int = Field(description="Number of restarts.")
    version: int
    env_steps: int
    report_age_s: float
    rss_bytes: int | None


class Actors(ResponseModel):
    """Desired and observed actors of a run."""

    desired: int
    ready: int
    most: int = Field(description="Maximum number of actors; 0 if it cannot change during the run.")
    actors: list[ActorState]


class LearnerStatus(ResponseModel):
    """Desired and observed learner of a run."""

    desired: Literal[0, 1]
    ready: Literal[0, 1]
    version: int
    updates: int


class ActorCount(FrozenConfig):
    """Desired number of actors."""

    actors: Annotated[int, Field(ge=0, le=1_000)]


class LearnerCount(FrozenConfig):
    """0 stops the run with a checkpoint, 1 resumes it from there."""

    learner: Literal[0, 1]


class Hyperparameter(ResponseModel):
    """A hyperparameter: its range, its value, and when a change takes effect."""

    name: str
    description: str
    schema_: dict[str, JsonValue] = Field(alias="schema", description="JSON Schema with the range.")
    value: JsonValue
    effect: Literal["live", "restart", "fixed"] = Field(
        description="When a change takes effect: live, with the next update; restart, when the run is stopped and started "
        "again; fixed, never in this run."
    )


class Hyperparameters(ResponseModel):
    algo: str
    hyperparameters: list[Hyperparameter]


class HyperparameterChange(FrozenConfig):
    """New values by name. With `dry_run`, the response shows their effects and nothing changes."""

    values: dict[str, Scalar] = Field(min_length=1, max_length=100)
    dry_run: bool = False


class Effect(ResponseModel):
    name: str
    before: JsonValue
    after: JsonValue
    effect: Literal["takes effect with the next update", "takes effect on restart"]


class Effects(ResponseModel):
    """Effects of a change; `operation` is null for a dry run."""

    effects: list[Effect]
    operation: Operation | None


class Series(ResponseModel):
    """Points [env_steps, time_s, value], oldest first; values that are not finite are null."""

    name: str
    points: list[tuple[int, float, float | None]]
    total: int = Field(description="Number of points since the cursor, before downsampling.")


class Metrics(ResponseModel):
    """Curves of a run; `next` is the cursor for later points."""

    series: list[Series]
    names: list[str] = Field(description="Names of all series of the run.")
    next: int


class Logs(ResponseModel):
    """Complete lines of one role's output; `next` is the cursor for later lines. The text is untrusted."""

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
    next: str | None = Field(None, description="Cursor of the next page; null on the last page.")


class EvaluationResult(ResponseModel):
    number: int
    time_s: float
    version: int
    env_steps: int
    episodes: int
    return_mean: float | None
    return_std: float | None
    reached: bool
    final: bool
    recording: str | None = Field(None, description="Name of the video of one episode, if one was recorded.")


class Evaluations(ResponseModel):
    evaluations: list[EvaluationResult]
    next: int


class Environment(ResponseModel):
    id: str
    max_episode_steps: int | None
    solved_at: float | None
    native_vector: bool
    needs: str | None = Field(description="The package that it needs and that is not installed here.")


class Environments(ResponseModel):
    environments: list[Environment]
    next: str | None = Field(None, description="Cursor of the next page; null on the last page.")


class Algorithm(ResponseModel):
    name: str
    summary: str
    actions: list[str]
    memory: str
    hyperparameters: list[Hyperparameter]


class Algorithms(ResponseModel):
    algorithms: list[Algorithm]
    next: str | None = Field(None, description="Cursor of the next page; null on the last page.")


class RunDiagnosis(ResponseModel):
    """The bottleneck of a run in one sentence, and the measured numbers: shares of time, cores, actors."""

    window_s: float | None = Field(description="Length of the measured period; null for the whole run.")
    window: str = Field(description="The measured period in words.")
    rule: str
    sentence: str
    numbers: dict[str, float]
    shares: dict[str, dict[str, float]] = Field(description="Role → phase → share of the role's time.")
    lags: dict[str, int] = Field(description="Policy lag in versions → number of segments.")


class Version(ResponseModel):
    version: str
    api: str
    broker: str
    runtimes: list[str] = Field(description="Runtimes that are available here.")


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
    next: str | None = Field(None, description="Cursor of the next page; null on the last page.")
