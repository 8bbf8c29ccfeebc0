"""DeepSpeed engine subclasses: initialization, configuration, checkpoints.

Names are imported at first use: the configuration can be checked before DeepSpeed is loaded.
"""

from __future__ import annotations

if __name__ == "engine":  # a second import would duplicate its classes
    raise ImportError("'engine' is part of wavemare: import 'wavemare.engine' instead")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavemare.engine.data_parallel import Engine
    from wavemare.engine.initialize import build_engine
    from wavemare.engine.interruption import Interruption
    from wavemare.engine.launch import init_distributed
    from wavemare.engine.pipe import DualPipeVEngine, PipelineEngine
    from wavemare.engine.pipemare import PipeMareEngine

__all__ = [
    "DualPipeVEngine",
    "Engine",
    "Interruption",
    "PipeMareEngine",
    "PipelineEngine",
    "build_engine",
    "init_distributed",
]

_HOME = {
    "DualPipeVEngine": "pipe",
    "Engine": "data_parallel",
    "Interruption": "interruption",
    "PipeMareEngine": "pipemare",
    "PipelineEngine": "pipe",
    "build_engine": "initialize",
    "init_distributed": "launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
