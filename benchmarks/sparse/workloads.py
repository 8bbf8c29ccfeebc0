# SPDX-License-Identifier: Apache-2.0
"""The models of ``benchmarks sparse --compute sleep``: those of papers, scaled down.

A workload keeps what decides a comparison: the share of the tables in the model, the share of the
rows that a batch touches, and the time of the messages over that of the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.device_like import Part, put_to_sleep
from benchmarks.ranks import SEED
from benchmarks.request import Waits

_LAYERS = 4
"""Parts of the layers that are not tables; each hands its gradients out at its own time."""


@dataclass(frozen=True)
class Table:
    """An embedding.

    Args:
        rows: Number of rows.
        width: Elements of a row.
        ids: Rows that a rank's batch looks up, with repetitions, by Zipf's law.
        output: Whether it is behind the other layers, as the classes of a sampled softmax.
    """

    rows: int
    width: int
    ids: int
    output: bool = False


@dataclass(frozen=True)
class Workload:
    """A model.

    Args:
        tables: Its embeddings.
        dense: Weights of the other layers.
        messages: Time of a dense sum of all gradients over a ring of many ranks, relative to the
            time of the computation.
        source: Where sizes and times come from.
    """

    tables: tuple[Table, ...]
    dense: int
    messages: float
    source: str

    @property
    def numel(self) -> int:
        """Weights of the model."""
        return self.dense + sum(table.rows * table.width for table in self.tables)

    def mbit(self, step_s: float) -> float:
        """Return the speed of links, in Mbit/s, at which messages take their time.

        Args:
            step_s: Seconds of the computation of a step.
        """
        return 2 * 4 * 8 * self.numel / (self.messages * step_s) / 1e6


WORKLOADS: Mapping[str, Workload] = {
    "lstm": Workload(
        (Table(50_000, 64, 2_560), Table(50_000, 64, 8_192, output=True)),
        320_000,
        8.0,
        "LSTM of OmniReduce and Zen: two tables are 95 % of 1.6 GB, 128 x 20 words, 8,192 samples "
        "of the softmax; 25 Gbit/s, passes of 0.13 s",
    ),
    "deeplight": Workload(
        (Table(400_000, 16, 4_096),),
        6_400,
        9.0,
        "DeepLight of OmniReduce: one table is 99.9 % of 2.3 GB, 0.3 % of its gradient is not "
        "zero; 10 Gbit/s, passes of 0.4 s",
    ),
    "ncf": Workload(
        (Table(60_000, 32, 14_000), Table(12_000, 32, 6_000)),
        1_400,
        12.0,
        "NCF of OmniReduce: tables are 99.9 % of 0.7 GB, 15 % of the gradient is not zero; "
        "10 Gbit/s",
    ),
    "bert": Workload(
        (Table(30_522, 64, 1_536),),
        6_900_000,
        2.5,
        "BERT-large of OmniReduce: the table is 22 % of 1.3 GB, 4 x 384 words; 25 Gbit/s",
    ),
    "vocabulary": Workload(
        (Table(151_936, 64, 16_384),),
        300_000,
        8.0,
        "Qwen's vocabulary: the table and adapters are trained, 16,384 words; 10 Gbit/s",
    ),
    "vocabulary-whole": Workload(
        (Table(151_936, 64, 16_384),),
        151_936 * 64 + 4_000_000,
        8.0,
        "Qwen's vocabulary, untied: the table, the head and all layers are trained, 16,384 words; "
        "25 Gbit/s",
    ),
}


class Model(nn.Module):
    """A workload's weights; all models of a process share the memory of these.

    Args:
        workload: What to build.
        waits: Of all layers.
        rank: Gradients are multiples of rank + 1.

    Attributes:
        tables: The embeddings.
    """

    def __init__(self, workload: Workload, waits: Waits, rank: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList()
        inputs: list[Part] = []
        outputs: list[Part] = []
        for number, table in enumerate(workload.tables):
            weight = _memory((table.rows, table.width))
            module = nn.Embedding.from_pretrained(weight, freeze=False)
            self.tables.append(module)
            (outputs if table.output else inputs).append(Part(module, f"ids{number}"))
        self.layers = nn.ModuleList(
            nn.ParameterList([_memory((-(-workload.dense // _LAYERS),))]) for _ in range(_LAYERS)
        )
        parts = [*inputs, *map(Part, self.layers), *outputs]
        put_to_sleep(self, parts, waits, factor=rank + 1.0)


@cache
def _memory(shape: tuple[int, ...]) -> Tensor:
    """Return weights of a shape: nobody changes them."""
    return torch.ones(shape)


def batch_of_step(workload: Workload, step: int, rank: int) -> dict[str, Tensor]:
    """Return the ids of a rank in a step, by Zipf's law: ids0 (k,) for the first table, ..."""
    generator = np.random.default_rng([SEED, step, rank])
    tables = enumerate(workload.tables)
    return {f"ids{n}": zipf_ids(generator, table.rows, (table.ids,)) for n, table in tables}


def zipf_ids(generator: np.random.Generator, rows: int, shape: tuple[int, ...]) -> Tensor:
    """Return ids below ``rows``, the first one the most frequent, as the words of a language."""
    cumulative = _cumulative(rows)
    return torch.from_numpy(np.searchsorted(cumulative, generator.random(shape) * cumulative[-1]))


@cache
def _cumulative(rows: int) -> np.ndarray:
    return np.cumsum(1 / np.arange(1, rows + 1))
