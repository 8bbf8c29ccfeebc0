# SPDX-License-Identifier: Apache-2.0
"""``benchmarks pipeline``: pipelines of DeepSpeed, torch and wavemare on the same model.

Read `measure` first. Each rank is a stage; systems are built once and run in interleaved rounds.
"""
