# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench local-steps``: seconds per step over slow links, and steps to a loss."""
