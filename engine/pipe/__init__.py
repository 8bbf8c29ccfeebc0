# SPDX-License-Identifier: Apache-2.0
"""Pipeline engines: a stage runs its part of a checked plan.

In: a `PipelineModule` and a plan of `wavemare.pipeline`. Out: trained weights and the mean loss.
Read `engine.py` first, then its updates `flush.py` and `pipemare.py`, `passes.py` and `p2p.py`.
"""
