# SPDX-License-Identifier: Apache-2.0
"""BERT: masked-language pretraining, and sequence classification."""
