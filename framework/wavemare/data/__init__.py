# SPDX-License-Identifier: Apache-2.0
"""From a ``--data`` argument to batches: texts, tokenizer, tokens, samples, loader.

Read `wavemare.data.sources` first. Importing this package is cheap: torch, transformers and
datasets are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.data.encode import tokenize
    from wavemare.data.indexed import IndexedWriter, open_indexed
    from wavemare.data.loader import ResumableLoader, evaluation_batches
    from wavemare.data.megatron_order import blended_samples, build_gpt_index, split_ranges
    from wavemare.data.samples import MaskedDataset, PackedDataset
    from wavemare.data.text import load_text
    from wavemare.data.tokenizer import cached_tokenizer, train_tokenizer
    from wavemare.data.tokens import bigram_cross_entropy, check_fits, unigram_cross_entropy

__all__ = [
    "IndexedWriter",
    "MaskedDataset",
    "PackedDataset",
    "ResumableLoader",
    "bigram_cross_entropy",
    "blended_samples",
    "build_gpt_index",
    "cached_tokenizer",
    "check_fits",
    "evaluation_batches",
    "load_text",
    "open_indexed",
    "split_ranges",
    "tokenize",
    "train_tokenizer",
    "unigram_cross_entropy",
]

_HOME = {
    "IndexedWriter": "indexed",
    "MaskedDataset": "samples",
    "PackedDataset": "samples",
    "ResumableLoader": "loader",
    "bigram_cross_entropy": "tokens",
    "blended_samples": "megatron_order",
    "build_gpt_index": "megatron_order",
    "cached_tokenizer": "tokenizer",
    "check_fits": "tokens",
    "evaluation_batches": "loader",
    "load_text": "text",
    "open_indexed": "indexed",
    "split_ranges": "megatron_order",
    "tokenize": "encode",
    "train_tokenizer": "tokenizer",
    "unigram_cross_entropy": "tokens",
}

__getattr__ = at_first_use(__name__, _HOME)
