# SPDX-License-Identifier: Apache-2.0
"""Networks that the collectives may use, chosen by what the launch offers.

In: tensors and the ranks to send them to. Out: tensors of other ranks. Read `base.py` first.
"""

from wavemare.comm.transport.base import Exchange, Transport
from wavemare.comm.transport.choice import open_transport
from wavemare.comm.transport.staging import StagedTransport

__all__ = ["Exchange", "StagedTransport", "Transport", "open_transport"]
