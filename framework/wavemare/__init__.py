"""wavemare: a DeepSpeed drop-in for asynchronous and heterogeneous training."""

__version__ = "0.1.0"
