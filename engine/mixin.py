"""What all our engines add to DeepSpeed's."""

from __future__ import annotations

from typing import Any

from deepspeed import comm as dist

from wavemare.engine.checkpoint import CheckpointMixin

__all__ = ["EngineMixin"]


class EngineMixin(CheckpointMixin):
    """Checkpoints that are complete or absent, and the rank's place in the data."""

    @property
    def data_rank(self) -> int:
        """This process's place among those that train the same weights on other data."""
        engine: Any = self
        return int(dist.get_rank(group=engine.data_parallel_group))

    @property
    def data_world_size(self) -> int:
        """How many processes train the same weights on other data."""
        engine: Any = self
        return int(engine.dp_world_size)

    @property
    def step_lead(self) -> int:
        """How many optimizer steps more than rank 0 another rank may have done: here none."""
        return 0

    def step_metrics(self) -> dict[str, float]:
        """Return what the engine has measured of the last step, by name; here nothing."""
        return {}
