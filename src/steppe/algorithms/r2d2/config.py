"""The hyperparameters of R2D2."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from steppe.algorithms.shared.replay_config import SequenceConfig
from steppe.core.config.agent import default_cell_size, hidden_state_field
from steppe.core.config.fields import Width
from steppe.core.contracts.specs import EnvSpec, FieldSpec


class R2D2Config(SequenceConfig):
    """Recurrent Q-learning on prioritized sequences with stored state (Kapturowski et al. 2019)."""

    implementation = "steppe.algorithms.r2d2.r2d2:R2D2"

    dueling: bool = Field(True, description="Separate value and advantage streams.")
    value_rescaling: bool = Field(True, description="Learn values in a scale that brings large ones near each other.")
    cell: Literal["lstm", "gru"] = Field("lstm", description="What carries the state along.")
    cell_size: Width | None = Field(None, description="Numbers that the cell puts out; chosen to fit if absent.")

    def columns(self, spec: EnvSpec) -> tuple[FieldSpec, ...]:
        hidden = hidden_state_field(self.cell, self.cell_size or default_cell_size(spec))
        return hidden, FieldSpec("q_val", spec.action.sizes, "float32")

    def resolve_defaults(self, spec: EnvSpec, num_actors: int, num_envs: int | None) -> tuple[Self, int]:
        """16 environments per actor where they step as a vector, 8 elsewhere; segments so short that all actors together
        bring 256 steps before the next block of updates. Vectors: one layer of 64, a cell of 64 and a step size of 2e-3;
        images: 512 and 512, 1e-4.
        """
        envs = num_envs or (16 if spec.native_vector else 8)
        fitted = self._chosen(
            spec,
            segment_steps=max(1, 256 // (envs * num_actors)),
            learning_rate=1e-4 if spec.is_image else 2e-3,
            target_every=2_500 if spec.is_image else 500,
            sequence_stride=max(1, self.sequence_length // 2),
            hidden=(64,),
            cell_size=default_cell_size(spec),
        )
        return fitted, envs
