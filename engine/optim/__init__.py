# SPDX-License-Identifier: Apache-2.0
"""Optimizers that DeepSpeed does not have, and how they meet its partitions.

In: the section `optimizer` of the configuration. Out: a torch optimizer. Read `optimizers.py`
first.
"""
