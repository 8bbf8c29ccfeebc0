# SPDX-License-Identifier: Apache-2.0
"""Configuration of unequal work: the ``"wavemare": {"balance": ...}`` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from wavemare.engine.config_shape import ZERO_WEIGHTS, is_enabled
from wavemare.errors import ConfigError
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.wave_config import WaveletConfig
from wavemare.section import Section

__all__ = ["BalanceConfig", "check_balance", "check_shares"]

_KEY = "wavemare.balance"


class BalanceConfig(Section):
    """How the samples of a step are shared among unlike data-parallel ranks."""

    shares: list[int] | None = Field(default=None, min_length=1)
    """Samples of each data-parallel rank in a micro-batch. They sum to
    ``train_micro_batch_size_per_gpu`` (their mean) times the data-parallel ranks."""

    micro_steps: list[int] | None = Field(default=None, min_length=1)
    """Micro-batches of each data-parallel rank in an optimizer step, instead of ``shares``; ZeRO 0
    to 2, ``train_batch`` only. They sum to ``gradient_accumulation_steps`` times the ranks."""

    mean: Literal["samples", "tokens"] = "samples"
    """Whether all samples of a micro-batch weigh the same, or all labels other than -100."""

    @property
    def is_uneven(self) -> bool:
        """Whether it is said for each rank what it takes."""
        return self.shares is not None or self.micro_steps is not None

    @property
    def is_active(self) -> bool:
        """Whether losses have weights, or ranks do unequal numbers of micro-steps."""
        return self.is_uneven or self.mean == "tokens"


def check_balance(
    config: Mapping[str, Any],
    balance: BalanceConfig,
    *,
    pipeline: PipelineConfig,
    wavelet: WaveletConfig,
    zero_stage: int,
) -> None:
    """Check what unequal work goes with.

    Args:
        config: DeepSpeed configuration.
        balance: The section.
        pipeline: The section ``wavemare.pipeline``.
        wavelet: The section ``wavemare.wavelet``.
        zero_stage: Of ``zero_optimization``.

    Raises:
        ConfigError: Naming the key that does not go with it.
    """
    if wavelet.mode != "off" and balance.is_active:
        reason = "waves scale the losses of micro-batches that are alike on all ranks"
        raise ConfigError(
            "wavemare.wavelet.mode", wavelet.mode, reason, f'Set it "off", or leave out {_KEY}'
        )
    if balance.micro_steps is None:
        return
    key = f"{_KEY}.micro_steps"
    if balance.shares is not None:
        reason = "ranks take unequal micro-batches, or unequal numbers of them"
        raise ConfigError(key, balance.micro_steps, reason, f"Leave it out, or {_KEY}.shares")
    if balance.mean == "tokens":
        reason = "ranks that do unequal numbers of micro-steps cannot sum their tokens at each"
        raise ConfigError(f"{_KEY}.mean", balance.mean, reason, f'Use "samples", or {_KEY}.shares')
    if pipeline.stages > 1:
        reason = "all stages of all replicas pass on equally many micro-batches"
        raise ConfigError(key, balance.micro_steps, reason, f"Use {_KEY}.shares")
    if zero_stage == ZERO_WEIGHTS:
        reason = (
            "ZeRO 3 gathers weights at each micro-step of all ranks, so some would wait for ever"
        )
        raise ConfigError(key, balance.micro_steps, reason, f"Use {_KEY}.shares, or ZeRO 0 to 2")
    sixteen = [n for n in ("fp16", "bf16") if is_enabled(config, n)]
    if sixteen and not zero_stage:
        reason = "without ZeRO DeepSpeed's 16-bit optimizers reduce at each micro-step"
        raise ConfigError(f"{sixteen[0]}.enabled", True, reason, "Use ZeRO 1 or 2")


def check_shares(balance: BalanceConfig, sizes: Mapping[str, int], data_ranks: int) -> None:
    """Check the numbers against the batch sizes.

    Args:
        balance: The section.
        sizes: The three batch sizes of DeepSpeed by their keys.
        data_ranks: Number of data-parallel ranks.

    Raises:
        ConfigError: They are not one for each rank, or do not sum to what the sizes say.
    """
    for name, size_key in (
        ("shares", "train_micro_batch_size_per_gpu"),
        ("micro_steps", "gradient_accumulation_steps"),
    ):
        given = getattr(balance, name)
        if given is None or size_key not in sizes:
            continue
        key, wanted = f"{_KEY}.{name}", sizes[size_key] * data_ranks
        if len(given) != data_ranks:
            reason = f"there are {len(given)} numbers for {data_ranks} data-parallel ranks"
            raise ConfigError(key, given, reason, f"Give {data_ranks} numbers")
        if min(given) < 1:
            reason = "each rank takes part with one or more"
            raise ConfigError(key, given, reason, "Give positive numbers, or start fewer ranks")
        if sum(given) != wanted:
            reason = (
                f"they sum to {sum(given)}, and {size_key} x data-parallel ranks = "
                f"{sizes[size_key]} x {data_ranks} = {wanted}"
            )
            remedy = f"Give numbers that sum to {wanted}, or change {size_key}, which is their mean"
            raise ConfigError(key, given, reason, remedy)
