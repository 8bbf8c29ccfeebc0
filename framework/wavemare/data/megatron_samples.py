# SPDX-License-Identifier: Apache-2.0
"""Samples of indexed data in the order of Megatron's GPT, one data set or a blend of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from wavemare.data.gpt_index import blend_index, blend_sizes, build_gpt_index
from wavemare.data.packing import Sample
from wavemare.data.tokens import TokenStore
from wavemare.errors import DataError

__all__ = ["BlendedSamples", "MegatronSamples", "blended_samples"]

# As Megatron-core: the greedy rule may ask a data set for a little more than its share.
_SURPLUS = 0.005


class MegatronSamples(Dataset[Sample]):
    """What a GPT of Megatron reads of one data set, in its order.

    An item is ``{"input_ids": int64 [n], "labels": int64 [n]}`` in the Hugging Face convention, the
    labels equal to the inputs. ``n`` is the sequence length, one more with ``extra_token``: then
    shifting gives Megatron's own ``tokens`` and ``labels``.

    Args:
        store: The tokens, one document of Megatron's GPT (a sequence of the file) each.
        documents: Those to read.
        num_samples: Samples needed; None for one epoch.
        sequence_length: Tokens per sample.
        seed: Of the order.
        extra_token: See `build_gpt_index`.
    """

    def __init__(
        self,
        store: TokenStore,
        documents: range,
        *,
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        extra_token: bool = False,
    ) -> None:
        self.store = store
        self.index = build_gpt_index(
            np.diff(store.offsets).astype(np.int32),
            np.arange(documents.start, documents.stop, dtype=np.int32),
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


class BlendedSamples(Dataset[Sample]):
    """Samples of several data sets by weight.

    Args:
        parts: The data sets.
        weights: One for each.
        num_samples: Samples of the blend.

    Raises:
        DataError: A data set is too small for its share.
    """

    def __init__(
        self, parts: Sequence[MegatronSamples], weights: Sequence[float], num_samples: int
    ) -> None:
        self.parts = parts
        self.sources, self.places = blend_index(weights, num_samples)
        for number, taken in enumerate(np.bincount(self.sources, minlength=len(parts)).tolist()):
            if taken > len(parts[number]):
                reason = f"the blend takes {taken} samples of its {len(parts[number])}"
                name = parts[number].store.name
                raise DataError("--data", name, reason, "Build it for more samples")

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Sample:
        return self.parts[int(self.sources[index])][int(self.places[index])]


def blended_samples(
    stores: Sequence[TokenStore],
    ranges: Sequence[range],
    weights: Sequence[float] | None,
    *,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    extra_token: bool = False,
) -> MegatronSamples | BlendedSamples:
    """Return what Megatron would build of one split of its ``--data-path``.

    Args:
        stores: The data sets.
        ranges: The documents of the split in each.
        weights: One for each data set; None for a single one.
        num_samples: Samples needed; None for one epoch of a single data set.
        sequence_length: Tokens per sample.
        seed: Of the order.
        extra_token: See `build_gpt_index`.

    Raises:
        DataError: The documents do not fill a sample; or a blend of no set size.
    """

    def samples(store: TokenStore, documents: range, count: int | None) -> MegatronSamples:
        return MegatronSamples(
            store,
            documents,
            num_samples=count,
            sequence_length=sequence_length,
            seed=seed,
            extra_token=extra_token,
        )

    if weights is None:
        (store,), (documents,) = stores, ranges
        return samples(store, documents, num_samples)
    if num_samples is None:
        reason = "a blend has no epochs"
        raise DataError("num_samples", None, reason, "Say how many samples are needed")
    ready = blend_sizes(weights, num_samples, _SURPLUS)
    parts = [samples(*part) for part in zip(stores, ranges, ready, strict=True)]
    return BlendedSamples(parts, weights, sum(blend_sizes(weights, num_samples)))
