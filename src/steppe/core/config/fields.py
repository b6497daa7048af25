"""Frozen configuration objects, and the bounded numbers that their fields take."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from steppe.core.system.typecheck import to_python_number

# Every number has an upper bound: beyond it a value is a mistake, and some would overflow or fill the memory.
MAX_SETTING = 10**15  # as steps between evaluations: never
Positive = Annotated[int, Field(gt=0, le=MAX_SETTING)]
Count = Annotated[int, Field(ge=0, le=MAX_SETTING)]
Rows = Annotated[int, Field(gt=0, le=10**8)]  # of a batch, or steps of a segment: what lies in memory at once
Width = Annotated[int, Field(gt=0, le=65_536)]  # of a layer
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=1e12)]
StepSize = Annotated[float, Field(gt=0.0, le=10.0)]
Coefficient = Annotated[float, Field(ge=0.0, le=1e6)]
Duration = Annotated[float, Field(ge=0.0, le=1e9)]  # seconds
PositiveDuration = Annotated[float, Field(gt=0.0, le=1e9)]
RoleCount = Annotated[int, Field(ge=0, le=100_000)]  # actors, workers or nodes of one run
SCHEDULE_STEPS = 100_000  # what schedules run over where a run has no fixed number of steps


def _to_python_numbers(value: Any) -> Any:
    return [to_python_number(item) for item in value] if isinstance(value, list) else to_python_number(value)


class FrozenConfig(BaseModel):
    """Configuration never changes after it is made, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, coerce_numbers_to_str=True
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_numbers(cls, values: Any) -> Any:
        """Take NumPy's and torch's numbers for numbers."""
        return (
            {name: _to_python_numbers(value) for name, value in values.items()} if isinstance(values, dict) else values
        )
