"""One model on several devices: groups of ranks, and the blocks that are split over them."""

from wavemare.parallel.mesh import TensorMesh

__all__ = ["TensorMesh"]
