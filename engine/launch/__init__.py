# SPDX-License-Identifier: Apache-2.0
"""Joins the processes that a launcher started, and ends them with the right exit code.

In: environment variables of deepspeed, torchrun, MPI or Slurm. Out: a process group. Read
`group.py` first.
"""
