# SPDX-License-Identifier: Apache-2.0
"""Transformers models as DeepSpeed pipelines, and their weights back out.

Read `families.py` first, then `chains.py`.
"""

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.models.convert import TiedWeight, tied_weights, to_pipeline
    from wavemare.models.deferred import from_folder
    from wavemare.models.export import save_pretrained
    from wavemare.models.families import SUPPORTED
    from wavemare.models.module import TransformerPipeline
    from wavemare.models.whole import whole_state_dict

__all__ = [
    "SUPPORTED",
    "TiedWeight",
    "TransformerPipeline",
    "from_folder",
    "save_pretrained",
    "tied_weights",
    "to_pipeline",
    "whole_state_dict",
]

_HOME = {
    "SUPPORTED": "families",
    "TiedWeight": "convert",
    "TransformerPipeline": "module",
    "from_folder": "deferred",
    "save_pretrained": "export",
    "tied_weights": "convert",
    "to_pipeline": "convert",
    "whole_state_dict": "whole",
}

__getattr__ = at_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
