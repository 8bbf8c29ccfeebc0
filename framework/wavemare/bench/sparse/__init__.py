# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench sparse``: ways to sum a sparse gradient over ranks, side by side."""
