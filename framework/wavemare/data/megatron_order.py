# SPDX-License-Identifier: Apache-2.0
"""Samples in the order of Megatron's GPT, of one data set or of a blend.

Three arrays decide the order. The document index lists the documents of all epochs in shuffled
order. The sample index says where each sample of ``sequence_length`` tokens (and one more, the last
label) begins in these documents laid end to end. The shuffle index permutes the samples. A blend
takes each sample from the data set whose share is behind the most.

Megatron-core makes the same arrays with a C++ extension (``core/datasets/gpt_dataset.py``,
``helpers.cpp``), and equal seeds give equal arrays. A "document" there is one sequence of the
``.idx`` file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset

from wavemare.comm.kernels import compiled
from wavemare.data.samples import Sample
from wavemare.data.tokens import TokenStore
from wavemare.errors import ConfigError, DataError
from wavemare.extras import require

_SPLITS = 3  # to train on, to validate, to test
_FINAL_EPOCH_SHARE = 0.80  # below it, a last epoch is shuffled apart
# As Megatron-core: the greedy rule may ask a data set for a little more than its share.
_SURPLUS = 0.005


@dataclass(frozen=True)
class GptIndex:
    """Where each sample stands.

    Attributes:
        documents: Documents of all epochs in the order in which they are read, int32.
        samples: Position in ``documents`` and token within that document where each sample begins,
            and where the last one ends, int32 or int64 [num_samples + 1, 2].
        shuffle: Which sample is the i-th, uint32 or int64 [num_samples].
    """

    documents: NDArray[np.int32]
    samples: NDArray[Any]
    shuffle: NDArray[Any]


def build_gpt_index(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int32],
    *,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    extra_token: bool = True,
) -> GptIndex:
    """Make the three arrays; whole epochs, as many as the samples need.

    Args:
        lengths: Tokens of each document of the data set.
        documents: Those that are read.
        num_samples: Samples that are needed; None for one epoch.
        sequence_length: Tokens per sample, without the extra one.
        seed: Of both shuffles.
        extra_token: Whether samples overlap by one token, the label of the last.

    Raises:
        DataError: The documents do not fill one sample.
    """
    extra = int(extra_token)
    per_epoch = int(lengths[documents].sum(dtype=np.int64))
    if per_epoch - extra < sequence_length:
        reason = f"{len(documents)} documents of {per_epoch} tokens do not fill one sample"
        remedy = "Give more data, a larger share or a smaller sequence length"
        raise DataError("--data", sequence_length, reason, remedy)
    needed = 0 if num_samples is None else num_samples * sequence_length + extra
    epochs = max(1, -(-needed // per_epoch))
    before_last = ((epochs - 1) * per_epoch - extra) // sequence_length
    # A last epoch of which only a part is needed must not spread over the others.
    apart = (
        num_samples is not None
        and epochs > 1
        and num_samples - before_last
        < int(_FINAL_EPOCH_SHARE * ((per_epoch - extra) // sequence_length))
    )
    state = np.random.RandomState(seed)
    order = _document_index(documents, epochs, state, apart)
    samples = _sample_index(lengths, order, sequence_length, extra)
    total = len(samples) - 1
    shuffle = _shuffle_index(before_last if apart else total, total, state)
    return GptIndex(order, samples, shuffle)


def _document_index(
    documents: NDArray[np.int32], epochs: int, state: np.random.RandomState, apart: bool
) -> NDArray[np.int32]:
    parts = [epochs - 1, 1] if apart else [epochs]
    orders = [np.tile(documents.astype(np.int32), part) for part in parts]
    for order in orders:
        state.shuffle(order)
    return np.concatenate(orders)


def _sample_index(
    lengths: NDArray[np.int32], order: NDArray[np.int32], sequence_length: int, extra: int
) -> NDArray[Any]:
    ends = np.cumsum(lengths[order], dtype=np.int64)
    num_samples = (int(ends[-1]) - extra) // sequence_length
    begins = np.arange(num_samples + 1, dtype=np.int64) * sequence_length
    # A sample begins in the document that holds its first token; without an extra token, just
    # behind the last token of the sample before, which may be a document's end.
    at = np.searchsorted(ends, begins + extra, side="left")
    at[0] = 0
    firsts = ends[at] - lengths[order[at]]
    largest = max(len(order), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    return np.stack([at, begins - firsts], axis=1).astype(dtype)


def _shuffle_index(first: int, total: int, state: np.random.RandomState) -> NDArray[Any]:
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [np.arange(first, dtype=dtype), np.arange(first, total, dtype=dtype)]
    for part in parts[: 1 if first == total else 2]:
        state.shuffle(part)
    return np.concatenate(parts)


def split_ranges(split: str, num_documents: int) -> list[range]:
    """Return the documents to train on, to validate and to test.

    Args:
        split: Megatron's ``--split``: up to three shares such as ``969,30,1``, of any sum.
        num_documents: How many there are.

    Raises:
        ConfigError: There are more than three numbers, none above 0, or something else.
    """
    if not re.fullmatch(r"\s*\d*\.?\d+\s*([,/\s]\s*\d*\.?\d+\s*){0,2}", split):
        reason = "it is not one to three shares"
        raise ConfigError("--split", split, reason, "Give shares such as 969,30,1")
    shares = np.array([float(share) for share in re.findall(r"[.0-9]+", split)])
    if shares.sum() == 0:
        raise ConfigError("--split", split, "all shares are 0", "Give shares such as 969,30,1")
    shares = np.pad(shares, (0, _SPLITS - len(shares))) / shares.sum()
    edges = [0.0]
    for share in shares.tolist():
        edges.append(edges[-1] + share)
    places = [round(edge * float(num_documents)) for edge in edges]
    return [range(first, last) for first, last in pairwise(places)]


def blend_sizes(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """Return how many samples each data set gives, or with a surplus, has to have ready.

    Args:
        weights: Of the data sets, of any sum.
        num_samples: Of the blend.
        surplus: Share of samples more.
    """
    shares = (np.array(weights, dtype=np.float64) / np.sum(weights)).tolist()
    return [math.ceil(math.ceil(num_samples * share) * (1 + surplus)) for share in shares]


def blend_index(
    weights: Sequence[float], num_samples: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return the data set of each sample, int16, and its number there, int64: the greedy rule.

    Sample i comes from the data set whose share of i samples exceeds what it has given the most;
    of equals, from the first.

    Raises:
        ConfigError: A weight is negative or none is above 0.
        LaunchError: numba is not installed.
    """
    given = np.array(weights, dtype=np.float64)
    if not np.isfinite(given).all() or (given < 0).any() or given.sum() <= 0:
        reason = "weights are 0 or more, and one is above"
        raise ConfigError("--data", list(weights), reason, "Give weights such as 0.3 A 0.7 B")
    sources, places = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    require("numba", "A blend of data sets")
    compiled(_fill_blend)(given / given.sum(), sources, places)
    return sources, places


def _fill_blend(shares: Any, sources: Any, places: Any) -> None:
    # Divided and compared as in C++, so that equal errors are equal there, too.
    taken = np.zeros(len(shares), np.int64)
    for i in range(len(sources)):
        best, largest = 0, -np.inf
        for source in range(len(shares)):
            error = shares[source] * max(float(i), 1.0) - float(taken[source])
            if error > largest:
                best, largest = source, error
        sources[i], places[i] = best, taken[best]
        taken[best] += 1


class MegatronSamples(Dataset[Sample]):
    """What a GPT of Megatron reads of one data set, in its order; see `blended_samples`."""

    def __init__(
        self,
        store: TokenStore,
        *,
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        extra_token: bool,
    ) -> None:
        self.store = store
        self.index = build_gpt_index(
            np.diff(store.offsets).astype(np.int32),
            np.arange(store.num_documents, dtype=np.int32),
            num_samples=num_samples,
            sequence_length=sequence_length,
            seed=seed,
            extra_token=extra_token,
        )
        self._extra = int(extra_token)

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids = torch.from_numpy(self.tokens(index))
        return {"input_ids": ids, "labels": ids.clone()}

    def tokens(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of a sample."""
        sample = int(self.index.shuffle[index])
        (first, start), (last, end) = self.index.samples[sample : sample + 2].tolist()
        end += self._extra
        numbers = self.index.documents[first : last + 1]
        parts = [self.store.document(int(number)) for number in numbers]
        parts[-1] = parts[-1][:end]
        parts[0] = parts[0][start:]
        return np.concatenate(parts, dtype=np.int64)


def blended_samples(
    stores: Sequence[TokenStore],
    weights: Sequence[float] | None,
    *,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    extra_token: bool = False,
) -> Dataset[Sample]:
    """Return what Megatron would build of one split of its ``--data-path``.

    An item is ``{"input_ids": int64 [n], "labels": int64 [n]}`` in the Hugging Face convention, the
    labels equal to the inputs. ``n`` is the sequence length, one more with ``extra_token``: then
    shifting gives Megatron's own ``tokens`` and ``labels``.

    Args:
        stores: The documents of the split in each data set; one of them is a sequence of the file.
        weights: One for each data set; None for a single one.
        num_samples: Samples needed; None for one epoch of a single data set.
        sequence_length: Tokens per sample.
        seed: Of the order.
        extra_token: See `build_gpt_index`.

    Raises:
        DataError: The documents do not fill a sample, a data set is too small for its share, or a
            blend has no size.
    """
    options: dict[str, Any] = {
        "sequence_length": sequence_length,
        "seed": seed,
        "extra_token": extra_token,
    }
    if weights is None:
        (store,) = stores
        return MegatronSamples(store, num_samples=num_samples, **options)
    if num_samples is None:
        reason = "a blend has no epochs"
        raise DataError("num_samples", None, reason, "Say how many samples are needed")
    filled = [pair for pair in zip(stores, weights, strict=True) if pair[1]]
    stores, weights = zip(*filled, strict=True)  # of weight 0 nothing is read
    ready = blend_sizes(weights, num_samples, _SURPLUS)
    parts = [
        MegatronSamples(store, num_samples=count, **options)
        for store, count in zip(stores, ready, strict=True)
    ]
    sources, places = blend_index(weights, sum(blend_sizes(weights, num_samples)))
    for part, taken in zip(parts, np.bincount(sources, minlength=len(parts)), strict=True):
        if taken > len(part):
            reason = f"the blend takes {taken} samples of its {len(part)}"
            raise DataError("--data", part.store.name, reason, "Build it for more samples")
    starts = np.cumsum([0, *map(len, parts[:-1])])
    numbers: Any = starts[sources] + places
    return Subset(ConcatDataset(parts), numbers)
