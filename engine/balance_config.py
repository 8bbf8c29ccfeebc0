# SPDX-License-Identifier: Apache-2.0
"""Configuration of unequal work: the ``"wavemare": {"balance": ...}`` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from wavemare.errors import ConfigError
from wavemare.pipeline.wave_config import WaveletConfig
from wavemare.section import Section

__all__ = ["BalanceConfig", "check_balance", "check_shares"]

_KEY = "wavemare.balance"


class BalanceConfig(Section):
    """How the samples of a step are shared among unlike data-parallel ranks."""

    shares: list[int] | None = Field(default=None, min_length=1)
    """Samples of each data-parallel rank in a micro-batch. They sum to
    ``train_micro_batch_size_per_gpu`` (their mean) times the data-parallel ranks."""

    mean: Literal["samples", "tokens"] = "samples"
    """Whether all samples of a micro-batch weigh the same, or all labels other than -100."""

    @property
    def is_active(self) -> bool:
        """Whether losses have weights."""
        return self.shares is not None or self.mean == "tokens"


def check_balance(balance: BalanceConfig, wavelet: WaveletConfig) -> None:
    """Check what unequal work goes with.

    Raises:
        ConfigError: Waves are on, with which it does not go.
    """
    if wavelet.mode != "off" and balance.is_active:
        reason = "waves scale the losses of micro-batches that are alike on all ranks"
        raise ConfigError(
            "wavemare.wavelet.mode", wavelet.mode, reason, f'Set it "off", or leave out {_KEY}'
        )


def check_shares(balance: BalanceConfig, sizes: Mapping[str, int], data_ranks: int) -> None:
    """Check the numbers against the batch sizes.

    Args:
        balance: The section.
        sizes: The three batch sizes of DeepSpeed by their keys.
        data_ranks: Number of data-parallel ranks.

    Raises:
        ConfigError: They are not one for each rank, or do not sum to what the sizes say.
    """
    given, size_key = balance.shares, "train_micro_batch_size_per_gpu"
    if given is None or size_key not in sizes:
        return
    key, wanted = f"{_KEY}.shares", sizes[size_key] * data_ranks
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
