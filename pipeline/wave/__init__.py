# SPDX-License-Identifier: Apache-2.0
"""Plans of waves on one rank, their memory and their gain. Imports no torch.

In: segments and what they cost. Out: a plan and the predicted time. Read `schedule.py` first.
"""
