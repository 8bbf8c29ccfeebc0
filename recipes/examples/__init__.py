# SPDX-License-Identifier: Apache-2.0
"""One feature in each file, on little data: wavemare launch --nproc 2 recipes/examples/FILE."""
