# SPDX-License-Identifier: Apache-2.0
"""wavemare: a DeepSpeed drop-in for asynchronous and heterogeneous training.

`initialize` turns a model and a JSON configuration into an engine; read ``wavemare.api`` first.
Names are imported at first use, so that ``import wavemare`` costs nothing by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.api import init_distributed, initialize
    from wavemare.models import save_pretrained, to_pipeline
    from wavemare.parallel import annotate, replica, split, stage

__version__ = "0.2.0"

__all__ = [
    "annotate",
    "init_distributed",
    "initialize",
    "replica",
    "save_pretrained",
    "split",
    "stage",
    "to_pipeline",
]

_HOME = {
    "annotate": "parallel",
    "init_distributed": "api",
    "initialize": "api",
    "replica": "parallel",
    "save_pretrained": "models",
    "split": "parallel",
    "stage": "parallel",
    "to_pipeline": "models",
}

__getattr__ = at_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
