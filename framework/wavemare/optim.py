# SPDX-License-Identifier: Apache-2.0
"""Optimizers for asynchronous pipelines, and for all others."""

from wavemare.pipeline.optim.soap_muon import SOAP, Muon, refresh_of

__all__ = ["SOAP", "Muon", "refresh_of"]
