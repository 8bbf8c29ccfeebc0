# SPDX-License-Identifier: Apache-2.0
"""``--balance auto|FILE|none``: a plan that shares the work among unlike devices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.engine.config.resolve import SECTION, WavemareConfig, zero_section
from wavemare.engine.config.shape import is_enabled
from wavemare.errors import ConfigError, PlanError
from wavemare.files import atomic_write_text
from wavemare.parallel.layout.layout import Layout

if TYPE_CHECKING:
    import torch


__all__ = ["BalanceController"]

AUTO, NONE = "auto", "none"


class BalanceController:
    """The plan of a run, and the configuration that executes it.

    Args:
        choice: The option ``--balance``.
        config: DeepSpeed's configuration.
        folder: The run folder; a measured plan is written there as ``plan.json``.
        resume: Whether the run continues, by its own plan.

    Attributes:
        config: DeepSpeed's configuration, completed by the plan as soon as there is one.
        plan: The plan; None without one.

    Raises:
        ConfigError: The file cannot be read, or the configuration cannot be balanced.
        PlanError: The file holds no plan.
    """

    def __init__(self, choice: str, config: dict[str, Any], folder: Path, *, resume: bool) -> None:
        self.config = config
        self.plan: Layout | None = None
        self._choice = choice
        self._file = folder / "plan.json"
        self._measures = choice == AUTO
        if choice == NONE:
            return
        section = WavemareConfig.of(config)
        if section.parallel.given:
            reason = "wavemare.parallel already lays out the model"
            raise ConfigError("--balance", choice, reason, "Leave out one of the two")
        if choice != AUTO:
            self._use(_read(Path(choice)))
        elif resume and self._file.is_file() and section.pipeline.stages > 1:
            # Weights stay where they are. Replicas alone may be measured again.
            self._measures = False
            self._use(_read(self._file))

    @property
    def shares(self) -> Sequence[int] | None:
        """Samples per micro-batch of each rank; None for equal ones."""
        return WavemareConfig.of(self.config).balance.shares

    def measure(self, model: Any, batch: dict[str, int], *, sequence_length: int) -> Layout | None:
        """Measure the devices and make the plan, if the option asks for it; complete `config`.

        Returns:
            The measured plan; None if nothing was measured.

        Raises:
            ConfigError: The configuration cannot be balanced.
            PlanError: The ranks have read different plans.
        """
        if self._choice == NONE:
            return None
        self._agree()
        if self._measures:
            self._measure(model, batch, sequence_length)
        if self.plan is not None and not type(model).__name__.endswith("ForSequenceClassification"):
            self._weight_by_tokens(self.plan)
        return self.plan if self._measures else None

    def _agree(self) -> None:
        # The run folder may be local to each machine, and hold a plan on some of them.
        from torch import distributed as dist

        own = None if self.plan is None else self.plan.digest[:12]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                reason = f"rank 0 has read {found[0] or 'no plan'}, rank {rank} {theirs or 'none'}"
                remedy = f"Give all machines the same file, also {self._file} of a run that resumes"
                raise PlanError("--balance", self._choice, reason, remedy)

    def _measure(self, model: Any, batch: dict[str, int], sequence_length: int) -> None:
        from wavemare.models.timing import rank_times
        from wavemare.parallel.balance import balance_replicas, example_samples, plan_stages

        section = WavemareConfig.of(self.config)
        if section.tensor_parallel.size > 1:
            reason = "ranks that share layers wait for each other at each of them"
            raise ConfigError("--balance", AUTO, reason, "Put like devices there, and give a plan")
        if section.wavelet.mode != "off":
            reason = "waves scale the losses of micro-batches that are alike on all ranks"
            mode, remedy = section.wavelet.mode, 'Set it "off", or --balance none'
            raise ConfigError("wavemare.wavelet.mode", mode, reason, remedy)
        options: dict[str, Any] = {
            "zero_stage": int(zero_section(self.config).get("stage", 0)),
            "sequence_length": sequence_length,
        }
        dtype, pipeline = _half_type(self.config), section.pipeline
        if pipeline.stages > 1:
            table = rank_times(
                model,
                samples=batch["train_micro_batch_size_per_gpu"],
                sequence_length=sequence_length,
                inputs=pipeline.inputs,
                dtype=dtype,
            )
            stages, schedule = pipeline.stages, pipeline.schedule
            plan = plan_stages(table, batch, stages=stages, schedule=schedule, **options)
        else:
            plan = balance_replicas(
                model,
                lambda samples: example_samples(model, sequence_length, samples),
                batch,
                dtype=dtype,
                **options,
            )
        self._use(plan)

    def save(self, rank: int) -> None:
        """Write the plan into the run folder, by rank 0."""
        if self.plan is not None and rank == 0:
            atomic_write_text(self._file, self.plan.to_json())

    def _use(self, plan: Layout) -> None:
        self.plan = plan
        self.config = plan.configure(self.config)
        section = dict(self.config[SECTION])
        if self._measures and plan.stages == 1:
            # No checkpoint is bound to measured shares.
            section["balance"] = {**section.get("balance", {}), "shares": list(plan.shares)}
        else:
            section["parallel"] = {"plan": json.loads(plan.to_json())}
        self.config = {**self.config, SECTION: section}

    def _weight_by_tokens(self, plan: Layout) -> None:
        # Samples have different numbers of labels (masked tokens, all but the first of a document).
        if plan.wavelet and plan.stages == 1:
            return  # their losses cannot be weighted, and their shares are equal
        section = dict(self.config[SECTION])
        section["balance"] = {"mean": "tokens", **section.get("balance", {})}
        self.config = {**self.config, SECTION: section}


def _half_type(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the 16-bit type that a configuration computes in, None for 32 bits."""
    import torch

    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for name, dtype in types.items() if is_enabled(config, name)), None)


def _read(file: Path) -> Layout:
    try:
        return Layout.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "this is not text"
        remedy = "Give auto, none, or a file that 'wavemare plan search --output' wrote"
        raise ConfigError("--balance", str(file), f"it cannot be read ({reason})", remedy) from None
    except PlanError as error:
        error.key = f"--balance {file}: {error.key}"
        raise
