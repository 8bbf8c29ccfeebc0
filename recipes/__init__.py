# SPDX-License-Identifier: Apache-2.0
"""Complete training jobs, readable from top to bottom, with JSON configurations beside them.

Read `gpt/pretrain.py` first.
"""

if __name__ == "recipes":  # a second import would duplicate its classes
    raise ImportError("'recipes' is part of wavemare: import 'wavemare.recipes' instead")
