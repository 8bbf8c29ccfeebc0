# SPDX-License-Identifier: Apache-2.0
"""``--balance auto|FILE|none``: plans for unlike devices, in a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.engine.config.resolve import SECTION, WavemareConfig, zero_section
from wavemare.engine.config.shape import is_enabled
from wavemare.errors import ConfigError, PlanError
from wavemare.files import atomic_write_text
from wavemare.parallel.layout.layout import Layout

if TYPE_CHECKING:
    import torch


__all__ = ["Balancing"]

AUTO, NONE = "auto", "none"


class Balancing:
    """The plan of a run, and its file.

    Args:
        choice: Of ``--balance``.
        config: DeepSpeed's configuration.
        folder: Of the run, where a measured plan is left as ``plan.json``.
        resumes: Whether an earlier run goes on, by its own plan.

    Raises:
        ConfigError: The file cannot be read, or the configuration cannot be balanced.
        PlanError: It holds no plan.
    """

    def __init__(self, choice: str, config: dict[str, Any], folder: Path, *, resumes: bool) -> None:
        self.config = config
        self.plan: Layout | None = None
        self._file = folder / "plan.json"
        self._choice = choice
        self.measures = choice == AUTO
        section = WavemareConfig.of(config)
        if choice == NONE:
            return
        if section.parallel.given:
            reason = "wavemare.parallel says how the model is laid out"
            raise ConfigError("--balance", choice, reason, "Leave out one of the two")
        if choice != AUTO:
            self._use(_read(Path(choice)))
        elif resumes and self._file.is_file() and section.pipeline.stages > 1:
            # Weights stay where they are; shares alone may be measured anew.
            self.measures = False
            self._use(_read(self._file))

    def measure(self, model: Any, batch: dict[str, int], *, sequence_length: int) -> Layout | None:
        """Measure the devices and make the plan, if that is wanted; complete `config`.

        Args:
            model: Whole on every rank.
            batch: DeepSpeed's three batch sizes by their keys.
            sequence_length: Tokens of a sample.

        Returns:
            The plan that was made, which `config` now runs; None if nothing was measured.

        Raises:
            ConfigError: What the configuration asks for cannot be balanced.
            PlanError: The ranks have read unlike plans, or not all of them one.
        """
        if self._choice != NONE:
            self._agree()
        if self.measures:
            self._measure(model, batch, sequence_length)
        if self.plan is not None and not type(model).__name__.endswith("ForSequenceClassification"):
            self._weigh_tokens(self.plan)
        return self.plan if self.measures else None

    def _agree(self) -> None:
        # A folder of each machine's own may hold a plan on some: others would wait for ever.
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
        from wavemare.parallel.planner.balance import balance_replicas, balance_stages
        from wavemare.parallel.planner.speed import example_samples

        section = WavemareConfig.of(self.config)
        if section.tensor_parallel.size > 1:
            reason = "ranks that share layers wait for each other at each of them"
            raise ConfigError("--balance", AUTO, reason, "Put like devices there, and give a plan")
        if section.wavelet.mode != "off":
            reason = "waves scale the losses of micro-batches that are alike on all ranks"
            mode = section.wavelet.mode
            raise ConfigError(
                "wavemare.wavelet.mode", mode, reason, 'Set it "off", or --balance none'
            )
        zero = int(zero_section(self.config).get("stage", 0))
        dtype = _half(self.config)
        if section.pipeline.stages > 1:
            plan = balance_stages(
                model,
                batch,
                stages=section.pipeline.stages,
                schedule=section.pipeline.schedule,
                inputs=section.pipeline.inputs,
                zero_stage=zero,
                sequence_length=sequence_length,
                dtype=dtype,
            )
        else:
            plan, _ = balance_replicas(
                model,
                lambda samples: example_samples(model, sequence_length, samples),
                batch,
                zero_stage=zero,
                sequence_length=sequence_length,
                dtype=dtype,
            )
        self._use(plan)

    def save(self) -> None:
        """Leave the plan in the run's folder; one rank calls it."""
        if self.plan is not None:
            atomic_write_text(self._file, self.plan.to_json())

    def _use(self, plan: Layout) -> None:
        self.plan = plan
        self.config = plan.configure(self.config)
        section = dict(self.config[SECTION])
        if self.measures and plan.stages == 1:
            # No checkpoint is bound to measured shares.
            section["balance"] = {**section.get("balance", {}), "shares": list(plan.shares)}
        else:
            section["parallel"] = {"plan": json.loads(plan.to_json())}
        self.config = {**self.config, SECTION: section}

    def _weigh_tokens(self, plan: Layout) -> None:
        # Samples have different numbers of labels (masked tokens, all but the first of a document).
        if plan.wavelet and plan.stages == 1:
            return  # their losses cannot be weighted, and their shares are equal
        section = dict(self.config[SECTION])
        section["balance"] = {"mean": "tokens", **section.get("balance", {})}
        self.config = {**self.config, SECTION: section}


def _half(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the 16-bit type that a configuration computes in, None for 32 bits."""
    import torch

    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in types.items():
        if is_enabled(config, name):
            return dtype
    return None


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
