# SPDX-License-Identifier: Apache-2.0
"""Transformers models as DeepSpeed pipelines, and their weights back out.

Read `families.py` first, then `chains.py`.
"""

from wavemare.models.convert import TiedWeight, tied_weights, to_pipeline
from wavemare.models.export import pipeline_state_dict, save_pretrained
from wavemare.models.families import SUPPORTED
from wavemare.models.module import TransformerPipeline

__all__ = [
    "SUPPORTED",
    "TiedWeight",
    "TransformerPipeline",
    "pipeline_state_dict",
    "save_pretrained",
    "tied_weights",
    "to_pipeline",
]
