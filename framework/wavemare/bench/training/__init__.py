# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench training``: whole optimizer steps, with gradients summed in several ways."""
