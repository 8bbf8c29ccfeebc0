# SPDX-License-Identifier: Apache-2.0
"""MPI for the peers that aggregate; its import starts MPI."""

from __future__ import annotations

from mpi4py import MPI
from torch import Tensor

from benchmarks.sparse.peers.base import AnySource
from wavemare.comm.transport.mpi_transport import TAG, MpiTransport, buffer_of


class AnySourceMpi(MpiTransport, AnySource):
    """`MpiTransport` that receives from whichever rank comes first, too."""

    def receive_any(self, tensor: Tensor) -> int:
        """Receive the next message of any peer; see `AnySource`."""
        request = self._comm.Irecv(buffer_of(tensor), MPI.ANY_SOURCE, TAG)
        return self.finish([request], []).Get_source()
