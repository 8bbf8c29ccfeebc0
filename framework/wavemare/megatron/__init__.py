# SPDX-License-Identifier: Apache-2.0
"""Where Megatron-LM's users come from: its checkpoints, arguments, steps and process grid.

Read `models.py` first, then `weights.py`.
"""
