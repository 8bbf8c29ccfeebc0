# SPDX-License-Identifier: Apache-2.0
"""Helpers of the recipes: options, checks before the start, resuming, evaluation.

In: a command line and a JSON configuration. Out: a checked `wavemare.training.run.TrainingRun`.
Read `wavemare.recipes.gpt.pretrain` first, which calls them in order.
"""
