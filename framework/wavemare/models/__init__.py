# SPDX-License-Identifier: Apache-2.0
"""Transformers models as DeepSpeed pipelines, and their weights back out.

Read `families.py` first, then `chains.py`.
"""

from wavemare.models.convert import TiedWeight, tied_weights, to_pipeline
from wavemare.models.export import save_pretrained
from wavemare.models.families import SUPPORTED
from wavemare.models.module import TransformerPipeline
from wavemare.models.whole import whole_state_dict

__all__ = [
    "SUPPORTED",
    "TiedWeight",
    "TransformerPipeline",
    "save_pretrained",
    "tied_weights",
    "to_pipeline",
    "whole_state_dict",
]
