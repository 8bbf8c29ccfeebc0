# SPDX-License-Identifier: Apache-2.0
"""What a run folder says of the engine that trains: how it is laid out, and its newest figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wavemare.engine.config.shape import SECTION
from wavemare.engine.launch.group import environment_world_size

if TYPE_CHECKING:
    from wavemare.engine.config.resolve import WavemareConfig

__all__ = ["EngineFacts"]


@dataclass(frozen=True)
class EngineFacts:
    """An engine's own account, which holds also where a plan has changed the configuration.

    Args:
        engine: Of `wavemare.initialize`; DeepSpeed's own, which tells less; or None.
    """

    engine: Any

    @property
    def section(self) -> WavemareConfig | None:
        """The checked section that the engine was built by; None if the engine is not ours."""
        return getattr(self.engine, "_sections", None)

    @property
    def stages(self) -> int:
        """Length of the pipeline; 1 without one."""
        return int(getattr(self.engine, "num_stages", 1))

    @property
    def tensor_parallel(self) -> int:
        """How many ranks share every layer."""
        return 1 if self.section is None else self.section.tensor_parallel.size

    @property
    def schedule(self) -> str:
        """Of the pipeline, as the configuration names it; ``data parallel`` without one."""
        if self.stages == 1:
            return "data parallel"
        return self.section.pipeline.schedule if self.section is not None else "1f1b"

    @property
    def settled(self) -> int:
        """The first step that runs as the later ones do; 0 where the first one does."""
        if self.section is None or self.schedule != "pipemare":
            return 0
        return self.section.pipeline.pipemare.warmup_steps + self.stages

    @property
    def batch(self) -> dict[str, int]:
        """DeepSpeed's three batch sizes by their keys: in samples, samples and micro-batches."""
        return {
            "train_batch_size": self.engine.train_batch_size(),
            "train_micro_batch_size_per_gpu": self.engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": self.engine.gradient_accumulation_steps(),
        }

    @property
    def learning_rate(self) -> float | None:
        """Of the first group: before a step the one that it uses, after it the next step's."""
        groups = getattr(getattr(self.engine, "optimizer", None), "param_groups", None)
        return float(groups[0]["lr"]) if groups else None

    def configuration(self) -> dict[str, Any]:
        """Return what ``config.json`` says of the batch and the section, as far as it is known."""
        known: dict[str, Any] = {} if self.engine is None else {"batch": self.batch}
        if self.section is not None:
            values = self.section.model_dump(mode="json")
            values["pipeline"]["stages"] = self.stages  # a PipelineModule may bring its own
            known[SECTION] = values
        return known

    def layout(self) -> dict[str, object]:
        """Return what ``summary.json`` says of how the model was trained."""
        processes: dict[str, object] = {"processes": environment_world_size()}
        if self.engine is None:
            return processes
        return {
            **processes,
            "stages": self.stages,
            "schedule": self.schedule,
            "zero_stage": int(self.engine.zero_optimization_stage()),
            **self.batch,
        }

    def line(self, rate: float | None, tokens_per_second: float | None) -> dict[str, float | None]:
        """Return what a line of ``metrics.jsonl`` says of the last step, beside its loss.

        Args:
            rate: The learning rate that the step used.
            tokens_per_second: Of all ranks.
        """
        told: dict[str, float | None] = {"learning_rate": rate}
        if self.engine is not None:
            norm = self.engine.get_global_grad_norm()
            told["grad_norm"] = None if norm is None else float(norm)
        told["tokens_per_second"] = tokens_per_second
        if self.engine is not None:
            told["samples"] = self.engine.global_samples
        return told | self.engine.step_metrics() if self.section is not None else told
