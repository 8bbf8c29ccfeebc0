# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench whale``: plans for unlike devices, which quotas make of one machine's cores."""
