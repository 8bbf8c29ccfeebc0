# SPDX-License-Identifier: Apache-2.0
"""Helpers of the recipes: options, checks before the start, resuming, evaluation.

In: a command line and a JSON configuration. Out: a checked, frozen `wavemare.training.setup.Setup`.
Read `wavemare.recipes.gpt.pretrain` first, which calls all of them in order.
"""
