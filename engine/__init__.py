# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed engine subclasses: initialization, configuration, checkpoints.

Names are imported at first use: the configuration can be checked before DeepSpeed is loaded.
"""

from __future__ import annotations

if __name__ == "engine":  # a second import would duplicate its classes
    raise ImportError("'engine' is part of wavemare: import 'wavemare.engine' instead")

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

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

__getattr__ = at_first_use(__name__, _HOME)
