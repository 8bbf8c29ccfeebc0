# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench soak``: hours of training with faults injected at random."""
