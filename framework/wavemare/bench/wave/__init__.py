# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench wave``: optimizer steps of a tensor-parallel GPT under plans of waves."""
