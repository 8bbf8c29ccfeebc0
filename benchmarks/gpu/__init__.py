# SPDX-License-Identifier: Apache-2.0
"""Measures on a GPU what no CPU can show, in parts that can be run alone.

`request` has the parts and the options, `run` starts the ranks of each part, and `measure` is a
rank. Without a GPU, every part runs on the CPU at tiny sizes.
"""
