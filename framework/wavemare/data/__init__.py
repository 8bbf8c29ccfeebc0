# SPDX-License-Identifier: Apache-2.0
"""Data for training: what ``--data`` names, its tokens, and the order in which they are read.

Importing this package is cheap: torch, transformers and datasets are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.data.classification import (
        LabelledCorpus,
        LabelledText,
        MajorityBaseline,
        load_classification,
        majority_baseline,
    )
    from wavemare.data.default_corpus import load_default_corpus
    from wavemare.data.documents import Corpus, Document
    from wavemare.data.encoding import EncodedDataset
    from wavemare.data.gpt_index import blend_index, build_gpt_index, split_ranges
    from wavemare.data.indexed_build import build_indexed
    from wavemare.data.indexed_merge import merge_indexed
    from wavemare.data.indexed_writer import IndexedWriter
    from wavemare.data.loader import ResumableLoader, evaluation_batches
    from wavemare.data.masking import MaskedDataset
    from wavemare.data.megatron import IndexedData, open_indexed, read_indexed
    from wavemare.data.megatron_samples import MegatronSamples, blended_samples
    from wavemare.data.packing import PackedDataset, check_fits
    from wavemare.data.sources import Kind, Source, all_documents, load_documents, resolve
    from wavemare.data.statistics import bigram_cross_entropy, unigram_cross_entropy
    from wavemare.data.tokenizer import cached_tokenizer, load_tokenizer, train_tokenizer
    from wavemare.data.tokens import TokenStore, check_length, split_store, tokenize

__all__ = [
    "Corpus",
    "Document",
    "EncodedDataset",
    "IndexedData",
    "IndexedWriter",
    "Kind",
    "LabelledCorpus",
    "LabelledText",
    "MajorityBaseline",
    "MaskedDataset",
    "MegatronSamples",
    "PackedDataset",
    "ResumableLoader",
    "Source",
    "TokenStore",
    "all_documents",
    "bigram_cross_entropy",
    "blend_index",
    "blended_samples",
    "build_gpt_index",
    "build_indexed",
    "cached_tokenizer",
    "check_fits",
    "check_length",
    "evaluation_batches",
    "load_classification",
    "load_default_corpus",
    "load_documents",
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

_MODULES = {
    "classification": (
        "LabelledCorpus",
        "LabelledText",
        "MajorityBaseline",
        "load_classification",
        "majority_baseline",
    ),
    "default_corpus": ("load_default_corpus",),
    "documents": ("Corpus", "Document"),
    "encoding": ("EncodedDataset",),
    "loader": ("ResumableLoader", "evaluation_batches"),
    "masking": ("MaskedDataset",),
    "gpt_index": ("blend_index", "build_gpt_index", "split_ranges"),
    "indexed_build": ("build_indexed",),
    "indexed_merge": ("merge_indexed",),
    "indexed_writer": ("IndexedWriter",),
    "megatron": ("IndexedData", "open_indexed", "read_indexed"),
    "megatron_samples": ("MegatronSamples", "blended_samples"),
    "packing": ("PackedDataset", "check_fits"),
    "sources": ("Kind", "Source", "all_documents", "load_documents", "resolve"),
    "statistics": ("bigram_cross_entropy", "unigram_cross_entropy"),
    "tokenizer": ("cached_tokenizer", "load_tokenizer", "train_tokenizer"),
    "tokens": ("TokenStore", "check_length", "split_store", "tokenize"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__getattr__ = at_first_use(__name__, _MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
