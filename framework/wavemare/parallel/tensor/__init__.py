# SPDX-License-Identifier: Apache-2.0
"""GPT-2 and BERT split by tensors over a group of ranks, as Megatron-LM does (Shoeybi et al. 2019).

Names are imported at first use: segments need DeepSpeed, the rest torch and transformers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.parallel.tensor.collectives import (
        copy_to_group,
        deferred_sums,
        gather_from_group,
        reduce_from_group,
    )
    from wavemare.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
    from wavemare.parallel.tensor.loss import vocab_parallel_cross_entropy
    from wavemare.parallel.tensor.partition import merge_state_dict, split_state_dict
    from wavemare.parallel.tensor.segments import tensor_segments
    from wavemare.parallel.tensor.share import VocabularyShare
    from wavemare.parallel.tensor.split import split_model
    from wavemare.parallel.tensor.state import merged_state_dict
    from wavemare.parallel.tensor.vocabulary import VocabParallelEmbedding, VocabParallelHead

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "VocabularyShare",
    "copy_to_group",
    "deferred_sums",
    "gather_from_group",
    "merge_state_dict",
    "merged_state_dict",
    "reduce_from_group",
    "split_model",
    "split_state_dict",
    "tensor_segments",
    "vocab_parallel_cross_entropy",
]

_HOME = {
    "ColumnParallelLinear": "layers",
    "RowParallelLinear": "layers",
    "VocabParallelEmbedding": "vocabulary",
    "VocabParallelHead": "vocabulary",
    "VocabularyShare": "share",
    "copy_to_group": "collectives",
    "deferred_sums": "collectives",
    "gather_from_group": "collectives",
    "merge_state_dict": "partition",
    "merged_state_dict": "state",
    "reduce_from_group": "collectives",
    "split_model": "split",
    "split_state_dict": "partition",
    "tensor_segments": "segments",
    "vocab_parallel_cross_entropy": "loss",
}

__getattr__ = at_first_use(__name__, _HOME)
