# SPDX-License-Identifier: Apache-2.0
"""Subclasses of DeepSpeed's engines, which add features to its steps.

In: a model and DeepSpeed's configuration. Out: an engine with ``train_batch``. Read `base.py`
first, then `feature.py`: what features are called for; of pipelines `pipe/engine.py`. Names are
imported at first use: the configuration can be checked before DeepSpeed is loaded.
"""

if __name__ == "engine":  # a second import would duplicate its classes
    raise ImportError("'engine' is part of wavemare: import 'wavemare.engine' instead")

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.engine.data_parallel import Engine
    from wavemare.engine.health.interruption import Interruption
    from wavemare.engine.initialize import build_engine
    from wavemare.engine.launch.group import init_distributed
    from wavemare.engine.pipe.engine import PipelineEngine
    from wavemare.engine.pipe.staged import DualPipeVEngine

__all__ = [
    "DualPipeVEngine",
    "Engine",
    "Interruption",
    "PipelineEngine",
    "build_engine",
    "init_distributed",
]

_HOME = {
    "DualPipeVEngine": "pipe.staged",
    "Engine": "data_parallel",
    "Interruption": "health.interruption",
    "PipelineEngine": "pipe.engine",
    "build_engine": "initialize",
    "init_distributed": "launch.group",
}

__getattr__ = at_first_use(__name__, _HOME)
