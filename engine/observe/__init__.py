# SPDX-License-Identifier: Apache-2.0
"""Records what each rank did and when.

In: the actions of a step. Out: times, memory and traces for the run report. Read `recorder.py`
first.
"""
