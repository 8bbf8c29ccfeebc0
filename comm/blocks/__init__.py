# SPDX-License-Identifier: Apache-2.0
"""Which blocks are not zero, who owns them, and where they lie in messages.

In: masks or row numbers of all ranks. Out: a layout that is the same on all ranks. Read `masks.py`
first.
"""
