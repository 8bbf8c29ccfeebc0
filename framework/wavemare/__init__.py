# SPDX-License-Identifier: Apache-2.0
"""wavemare: a DeepSpeed drop-in for asynchronous and heterogeneous training.

Names are imported at first use, so that ``import wavemare`` costs nothing by itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.api import init_distributed, initialize
    from wavemare.engine import DualPipeVEngine, Engine, PipelineEngine
    from wavemare.models import save_pretrained, to_pipeline
    from wavemare.parallel.annotations import replica, replicate, split, stage
    from wavemare.parallel.names import annotate
    from wavemare.parallel.planner.api import plan

__version__ = "0.2.0"

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
    "initialize": "api",
    "DualPipeVEngine": "engine",
    "Engine": "engine",
    "PipelineEngine": "engine",
    "annotate": "parallel.names",
    "init_distributed": "api",
    "plan": "parallel.planner.api",
    "replica": "parallel.annotations",
    "replicate": "parallel.annotations",
    "save_pretrained": "models",
    "split": "parallel.annotations",
    "stage": "parallel.annotations",
    "to_pipeline": "models",
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
_find = at_first_use(__name__, _HOME)


def __getattr__(name: str) -> Any:
    return import_module("wavemare.pipeline") if name == "pipeline" else _find(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
