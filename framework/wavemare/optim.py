# SPDX-License-Identifier: Apache-2.0
"""Optimizers for asynchronous pipelines, and for all others."""

from __future__ import annotations

from wavemare.pipeline.optim.muon import Muon
from wavemare.pipeline.optim.soap import SOAP, refresh_of

__all__ = ["SOAP", "Muon", "refresh_of"]
