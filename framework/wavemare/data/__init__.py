# SPDX-License-Identifier: Apache-2.0
"""From a ``--data`` argument to batches: texts, tokenizer, tokens, samples, loader.

Read `wavemare.data.sources` first.
"""
