# SPDX-License-Identifier: Apache-2.0
"""Asynchronous pipelines of any length in one process: `SimulatedPipeline`, and what they learn."""

from wavemare.simulation.pipeline import Delays, SimulatedPipeline

__all__ = ["Delays", "SimulatedPipeline"]
