# SPDX-License-Identifier: Apache-2.0
"""From a ``--data`` argument to batches: texts, tokenizer, tokens, samples, loader.

Read `wavemare.data.sources` first. Importing this package is cheap: torch, transformers and
datasets are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.data.classification import encode_labelled, load_classification, majority_baseline
    from wavemare.data.encode import build_indexed, tokenize
    from wavemare.data.indexed import IndexedData, open_indexed, read_indexed
    from wavemare.data.indexed_writer import IndexedWriter, merge_indexed
    from wavemare.data.loader import ResumableLoader, evaluation_batches
    from wavemare.data.megatron_order import (
        MegatronSamples,
        blend_index,
        blended_samples,
        build_gpt_index,
        split_ranges,
    )
    from wavemare.data.samples import MaskedDataset, PackedDataset, check_fits
    from wavemare.data.sources import resolve
    from wavemare.data.statistics import bigram_cross_entropy, unigram_cross_entropy
    from wavemare.data.text import load_text, load_texts_to_build
    from wavemare.data.tokenizer import cached_tokenizer, load_tokenizer, train_tokenizer
    from wavemare.data.tokens import TokenStore, split_store

__all__ = [
    "IndexedData",
    "IndexedWriter",
    "MaskedDataset",
    "MegatronSamples",
    "PackedDataset",
    "ResumableLoader",
    "TokenStore",
    "bigram_cross_entropy",
    "blend_index",
    "blended_samples",
    "build_gpt_index",
    "build_indexed",
    "cached_tokenizer",
    "check_fits",
    "encode_labelled",
    "evaluation_batches",
    "load_classification",
    "load_text",
    "load_texts_to_build",
    "load_tokenizer",
    "majority_baseline",
    "merge_indexed",
    "open_indexed",
    "read_indexed",
    "resolve",
    "split_ranges",
    "split_store",
    "tokenize",
    "train_tokenizer",
    "unigram_cross_entropy",
]

_HOME = {
    "IndexedData": "indexed",
    "IndexedWriter": "indexed_writer",
    "MaskedDataset": "samples",
    "MegatronSamples": "megatron_order",
    "PackedDataset": "samples",
    "ResumableLoader": "loader",
    "TokenStore": "tokens",
    "bigram_cross_entropy": "statistics",
    "blend_index": "megatron_order",
    "blended_samples": "megatron_order",
    "build_gpt_index": "megatron_order",
    "build_indexed": "encode",
    "cached_tokenizer": "tokenizer",
    "check_fits": "samples",
    "encode_labelled": "classification",
    "evaluation_batches": "loader",
    "load_classification": "classification",
    "load_text": "text",
    "load_texts_to_build": "text",
    "load_tokenizer": "tokenizer",
    "majority_baseline": "classification",
    "merge_indexed": "indexed_writer",
    "open_indexed": "indexed",
    "read_indexed": "indexed",
    "resolve": "sources",
    "split_ranges": "megatron_order",
    "split_store": "tokens",
    "tokenize": "encode",
    "train_tokenizer": "tokenizer",
    "unigram_cross_entropy": "statistics",
}

__getattr__ = at_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
