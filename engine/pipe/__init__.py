# SPDX-License-Identifier: Apache-2.0
"""Pipeline engines: a stage runs its part of a checked plan.

In: a `PipelineModule` and a plan of `wavemare.pipeline`. Out: trained weights and the mean loss.
Read `engine.py` first, then `linked.py`, `planned.py`, `split_backward.py` and `pipemare.py`.
"""
