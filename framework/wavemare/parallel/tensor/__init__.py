# SPDX-License-Identifier: Apache-2.0
"""GPT-2 and BERT split by tensors over a group of ranks, as Megatron-LM does (Shoeybi et al. 2019).

``split.split_model`` splits a model in place; read ``split.py`` first. `wavemare.models.whole` puts
its weights together again.
"""
