"""wavemare: a DeepSpeed drop-in for asynchronous and heterogeneous training.

Names are imported at first use, so that ``import wavemare`` costs nothing by itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavemare.api import initialize
    from wavemare.engine import DualPipeVEngine, Engine, PipelineEngine, init_distributed
    from wavemare.models import save_pretrained, to_pipeline

__version__ = "0.1.0"

__all__ = [
    "DualPipeVEngine",
    "Engine",
    "PipelineEngine",
    "init_distributed",
    "initialize",
    "save_pretrained",
    "to_pipeline",
]

_HOME = {
    "initialize": "wavemare.api",
    "DualPipeVEngine": "wavemare.engine",
    "Engine": "wavemare.engine",
    "PipelineEngine": "wavemare.engine",
    "init_distributed": "wavemare.engine",
    "save_pretrained": "wavemare.models",
    "to_pipeline": "wavemare.models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'wavemare' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
