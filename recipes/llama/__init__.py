# SPDX-License-Identifier: Apache-2.0
"""Llama: pretraining on text; and supervised fine-tuning on chats, of any causal model."""
