"""wavemare: a DeepSpeed drop-in for asynchronous and heterogeneous training.

Names are imported at first use, so that ``import wavemare`` costs nothing by itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavemare.api import init_distributed, initialize
    from wavemare.engine import DualPipeVEngine, Engine, PipelineEngine
    from wavemare.models import save_pretrained, to_pipeline
    from wavemare.parallel.annotations import replica, replicate, split, stage
    from wavemare.parallel.names import annotate
    from wavemare.parallel.planner.api import plan

__version__ = "0.1.0"

__all__ = [
    "DualPipeVEngine",
    "Engine",
    "PipelineEngine",
    "annotate",
    "init_distributed",
    "initialize",
    "pipeline",
    "plan",
    "replica",
    "replicate",
    "save_pretrained",
    "split",
    "stage",
    "to_pipeline",
]

_HOME = {
    "initialize": "wavemare.api",
    "DualPipeVEngine": "wavemare.engine",
    "Engine": "wavemare.engine",
    "PipelineEngine": "wavemare.engine",
    "annotate": "wavemare.parallel.names",
    "init_distributed": "wavemare.api",
    "plan": "wavemare.parallel.planner.api",
    "replica": "wavemare.parallel.annotations",
    "replicate": "wavemare.parallel.annotations",
    "save_pretrained": "wavemare.models",
    "split": "wavemare.parallel.annotations",
    "stage": "wavemare.parallel.annotations",
    "to_pipeline": "wavemare.models",
}


class _PipelinePackage(ModuleType):
    """``wavemare.pipeline``: the area of that name, and the annotation when it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("wavemare.parallel.annotations").pipeline(*args, **kwargs)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "pipeline" and isinstance(value, ModuleType):  # its import has ended
            value.__class__ = _PipelinePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "pipeline":
        return import_module("wavemare.pipeline")
    if name not in _HOME:
        raise AttributeError(f"module 'wavemare' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
