# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in DeepSpeed's file layout that are complete or absent.

In: an engine and a folder. Out: files, a manifest with checksums, and `latest`. Read
`checkpointing.py` first.
"""
