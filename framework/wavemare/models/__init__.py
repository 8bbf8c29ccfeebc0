# SPDX-License-Identifier: Apache-2.0
"""Transformers models as DeepSpeed pipelines, and their weights back out.

Read `families.py` first, then `chains.py`. Names are imported at first use: folders of weights can
be read without DeepSpeed.
"""

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
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

__getattr__ = at_first_use(
    __name__,
    {
        "SUPPORTED": "families",
        "TiedWeight": "convert",
        "TransformerPipeline": "module",
        "save_pretrained": "export",
        "tied_weights": "convert",
        "to_pipeline": "convert",
        "whole_state_dict": "whole",
    },
)
