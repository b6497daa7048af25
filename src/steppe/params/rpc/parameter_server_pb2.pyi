from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Parameter(_message.Message):
    __slots__ = ("name", "shape", "dtype", "offset", "trained")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    offset: int
    trained: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., offset: _Optional[int] = ..., trained: _Optional[bool] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("parameters",)
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    def __init__(self, parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker", "protocol")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    worker: str
    protocol: int
    def __init__(self, worker: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("new", "protocol", "run", "round_number", "last", "version", "synchronous", "deltas", "whole", "uses_weights", "supports_sums", "private", "layout")
    NEW_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    USES_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_SUMS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    new: bool
    protocol: int
    run: str
    round_number: int
    last: int
    version: int
    synchronous: bool
    deltas: bool
    whole: bool
    uses_weights: bool
    supports_sums: bool
    private: bool
    layout: Layout
    def __init__(self, new: _Optional[bool] = ..., protocol: _Optional[int] = ..., run: _Optional[str] = ..., round_number: _Optional[int] = ..., last: _Optional[int] = ..., version: _Optional[int] = ..., synchronous: _Optional[bool] = ..., deltas: _Optional[bool] = ..., whole: _Optional[bool] = ..., uses_weights: _Optional[bool] = ..., supports_sums: _Optional[bool] = ..., private: _Optional[bool] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...

class UnregisterRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class UnregisterReply(_message.Message):
    __slots__ = ("was_registered",)
    WAS_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    was_registered: bool
    def __init__(self, was_registered: _Optional[bool] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("worker", "newer_than")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NEWER_THAN_FIELD_NUMBER: _ClassVar[int]
    worker: str
    newer_than: int
    def __init__(self, worker: _Optional[str] = ..., newer_than: _Optional[int] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("newer", "version", "updates", "round_number", "layout", "values")
    NEWER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    ROUND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    newer: bool
    version: int
    updates: int
    round_number: int
    layout: Layout
    values: bytes
    def __init__(self, newer: _Optional[bool] = ..., version: _Optional[int] = ..., updates: _Optional[int] = ..., round_number: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., values: _Optional[bytes] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("worker", "weight", "number", "version", "refusal", "values")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    weight: float
    number: int
    version: int
    refusal: Refusal
    values: bytes
    def __init__(self, worker: _Optional[str] = ..., weight: _Optional[float] = ..., number: _Optional[int] = ..., version: _Optional[int] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., values: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("accepted", "round_number", "version", "reason", "message")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ROUND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    round_number: int
    version: int
    reason: str
    message: str
    def __init__(self, accepted: _Optional[bool] = ..., round_number: _Optional[int] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class SumOverWorkersRequest(_message.Message):
    __slots__ = ("worker", "round_number", "values")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROUND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    round_number: int
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, worker: _Optional[str] = ..., round_number: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class SumOverWorkersReply(_message.Message):
    __slots__ = ("round_number", "complete", "total")
    ROUND_NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    round_number: int
    complete: bool
    total: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, round_number: _Optional[int] = ..., complete: _Optional[bool] = ..., total: _Optional[_Iterable[float]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("worker", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, worker: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerStats(_message.Message):
    __slots__ = ("run", "version", "updates", "round", "num_workers", "num_parameters", "pending_pushes", "accepted_pushes", "refused_pushes", "abandoned_rounds", "last_trouble", "failed_saves", "fell_back", "aggregation_method", "optimizer", "takes", "synchronous", "refused_calls", "staleness", "workers", "privacy")
    class RefusedPushesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RefusedCallsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PUSHES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PUSHES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PUSHES_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LAST_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    FAILED_SAVES_FIELD_NUMBER: _ClassVar[int]
    FELL_BACK_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_METHOD_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    SYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CALLS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    updates: int
    round: int
    num_workers: int
    num_parameters: int
    pending_pushes: int
    accepted_pushes: int
    refused_pushes: _containers.ScalarMap[str, int]
    abandoned_rounds: int
    last_trouble: str
    failed_saves: int
    fell_back: bool
    aggregation_method: str
    optimizer: str
    takes: str
    synchronous: bool
    refused_calls: _containers.ScalarMap[str, int]
    staleness: _containers.ScalarMap[int, int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStats]
    privacy: PrivacyStats
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., updates: _Optional[int] = ..., round: _Optional[int] = ..., num_workers: _Optional[int] = ..., num_parameters: _Optional[int] = ..., pending_pushes: _Optional[int] = ..., accepted_pushes: _Optional[int] = ..., refused_pushes: _Optional[_Mapping[str, int]] = ..., abandoned_rounds: _Optional[int] = ..., last_trouble: _Optional[str] = ..., failed_saves: _Optional[int] = ..., fell_back: _Optional[bool] = ..., aggregation_method: _Optional[str] = ..., optimizer: _Optional[str] = ..., takes: _Optional[str] = ..., synchronous: _Optional[bool] = ..., refused_calls: _Optional[_Mapping[str, int]] = ..., staleness: _Optional[_Mapping[int, int]] = ..., workers: _Optional[_Iterable[_Union[WorkerStats, _Mapping]]] = ..., privacy: _Optional[_Union[PrivacyStats, _Mapping]] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("name", "registered", "accepted", "refused", "last_round", "version", "metrics")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    registered: bool
    accepted: int
    refused: _containers.ScalarMap[str, int]
    last_round: int
    version: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., registered: _Optional[bool] = ..., accepted: _Optional[int] = ..., refused: _Optional[_Mapping[str, int]] = ..., last_round: _Optional[int] = ..., version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class PrivacyStats(_message.Message):
    __slots__ = ("epsilon_spent", "epsilon_budget", "delta", "releases", "noise_multiplier", "clip_norm", "expected_clients", "sampling_rate")
    EPSILON_SPENT_FIELD_NUMBER: _ClassVar[int]
    EPSILON_BUDGET_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    NOISE_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    epsilon_spent: float
    epsilon_budget: float
    delta: float
    releases: int
    noise_multiplier: float
    clip_norm: float
    expected_clients: int
    sampling_rate: float
    def __init__(self, epsilon_spent: _Optional[float] = ..., epsilon_budget: _Optional[float] = ..., delta: _Optional[float] = ..., releases: _Optional[int] = ..., noise_multiplier: _Optional[float] = ..., clip_norm: _Optional[float] = ..., expected_clients: _Optional[int] = ..., sampling_rate: _Optional[float] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCheckpointReply(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...
