# SPDX-License-Identifier: Apache-2.0
"""GPT-2: pretraining on text, and going on from a Hugging Face folder."""
