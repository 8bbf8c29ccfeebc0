"""DeepSpeed engine subclasses: initialization, configuration, checkpoints."""

if __name__ == "engine":  # PyPI has packages of such names, and a second import duplicates classes
    raise ImportError("'engine' is part of wavemare: import 'wavemare.engine' instead")

from wavemare.engine.data_parallel import Engine
from wavemare.engine.initialize import build_engine
from wavemare.engine.launch import init_distributed
from wavemare.engine.pipe import DualPipeVEngine, PipelineEngine

__all__ = ["DualPipeVEngine", "Engine", "PipelineEngine", "build_engine", "init_distributed"]
