# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks local-steps-loss``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field, PositiveInt

from benchmarks.local_steps.sparse_code import CHUNK, SparseCode
from benchmarks.request import GptRequest, NonNegativeInt
from wavemare.cli.options import check_names
from wavemare.engine.local_steps.codec import Code
from wavemare.errors import ConfigError
from wavemare.observe.tables import Column, Row

OPTIMIZERS = ("adamw", "muon")


class Variant(NamedTuple):
    """One training of the benchmark.

    Args:
        optimizer: Of `OPTIMIZERS`.
        rate: Its largest learning rate.
        seed: Of weights and data.
        every: Steps between exchanges; 0 for synchronous training.
        code: How messages are written.
        outer: Learning rate and momentum of the outer optimizer.
    """

    optimizer: str
    rate: float
    seed: int
    every: int = 0
    code: Code = Code(32)
    outer: tuple[float, float] = (1.0, 0.0)


class LossRequest(GptRequest):
    """Measure the loss of local steps at equal steps, with all replicas in one process.

    Messages are written as in training, by the same functions, and nothing travels. A GPU is
    used if there is one. Gaps are to the best synchronous training with the same inner optimizer
    and seed.

    For example: python -m benchmarks local-steps-loss --optimizers muon --messages 32,2,64of4096x2
    """

    measured_by: ClassVar[str] = "benchmarks.local_steps.replay:measure"
    on_cpu: ClassVar[bool] = False
    columns: ClassVar[Mapping[str, Column]] = {
        "optimizer": Column("optimizer"),
        "rate": Column("rate", ".0e"),
        "every": Column("every", ".0f"),
        "message": Column("message"),
        "outer": Column("outer"),
        "seed": Column("seed", ".0f"),
        "loss": Column("loss", ".4f"),
        "gap": Column("gap", "+.2%"),
        "common": Column("common_loss", ".4f"),
        "bytes": Column("bytes_share", ".4f"),
        "s": Column("seconds", ".0f"),
    }

    optimizers: tuple[str, ...] = OPTIMIZERS
    """Inner optimizers: adamw, muon."""

    rates: tuple[float, ...] = (4e-3,)
    """Largest learning rates of the inner optimizers; Muon's as AdamW's (match_rms_adamw)."""

    every: tuple[int, ...] = (0, 30)
    """Steps between exchanges; 0 stands for synchronous training."""

    messages: tuple[str, ...] = ("32",)
    """Bits of a number: 32, 8, 4 or 2. 64of4096x2 stands for the 64 largest of 4,096 numbers, in 2
    bits."""

    outer: tuple[str, ...] = ("1/0.5",)
    """Learning rate and momentum of the outer optimizer."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of weights and data."""

    replicas: Annotated[int, Field(ge=2)] = 4
    """Replicas."""

    steps: PositiveInt = 1000
    """Optimizer steps of each replica."""

    warmup: NonNegativeInt = 0
    """Synchronous steps before the first local one."""

    layers: PositiveInt = 2
    hidden: PositiveInt = 64
    sequence: Annotated[int, Field(ge=2)] = 64
    batch: PositiveInt = 16

    @property
    def num_ranks(self) -> int:
        """One: all replicas are in one process."""
        return 1

    def check(self) -> None:
        """Check the names of optimizers, messages and outer optimizers."""
        super().check()
        check_names("--optimizers", self.optimizers, OPTIMIZERS)
        fields = type(self).model_fields
        for name in ("rounds", "warmups"):
            if getattr(self, name) != fields[name].default:
                reason, remedy = "a training of a seed has one loss", "Give several --seeds"
                raise ConfigError(f"--{name}", getattr(self, name), reason, remedy)
        self.variants()

    def variants(self) -> list[Variant]:
        """Return all trainings; of a seed and optimizer the synchronous ones first."""
        codes = [_code(word) for word in self.messages]
        outers = [_outer(word) for word in self.outer]
        found = []
        for seed, optimizer, every, rate in product(
            self.seeds, self.optimizers, sorted(self.every), self.rates
        ):
            one = Variant(optimizer, rate, seed, every)
            pairs = product(codes, outers)
            found += [one._replace(code=c, outer=o) for c, o in pairs] if every else [one]
        return found

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        return (
            f"{self.replicas} replicas of {self.batch} x {self.sequence} tokens, {self.steps} "
            f"steps: GPT of {result['parameters'] / 1e6:.2f} M weights"
        )

    def case(self, row: Row) -> str:
        """Return the inner optimizer."""
        return f"{row['optimizer']}, seed {row['seed']}"


def _code(word: str) -> Code:
    found = re.fullmatch(r"(?:(\d+)of4096x)?(32|8|4|2)", word)
    top_k, bits = (int(part or 0) for part in found.groups()) if found else (0, 0)
    if not bits or top_k % 4 or top_k > CHUNK or (top_k and bits == 32):  # noqa: PLR2004
        reason, remedy = "it is no message", "Write 32, 8, 4, 2 or 64of4096x2"
        raise ConfigError("--messages", word, reason, remedy)
    return SparseCode(bits, top_k) if top_k else Code(bits)


def _outer(word: str) -> tuple[float, float]:
    rate, _, momentum = word.partition("/")
    try:
        return float(rate), float(momentum)
    except ValueError:
        reason = "these are no two numbers with a slash between"
        raise ConfigError("--outer", word, reason, "Write it as 1/0.5") from None


def named(variant: Variant) -> dict[str, Any]:
    """Return what a row says of a training."""
    code, local = variant.code, variant.every > 0
    size = f"{code.top_k}of{CHUNK}x" if isinstance(code, SparseCode) else ""
    return {
        "optimizer": variant.optimizer,
        "rate": variant.rate,
        "seed": variant.seed,
        "every": variant.every,
        "message": f"{size}{code.bits}" if local else None,
        "outer": "{:g}/{:g}".format(*variant.outer) if local else None,
    }
