# SPDX-License-Identifier: Apache-2.0
"""The JSON configuration: DeepSpeed's, with one more section.

In: a path, a dictionary or the script's arguments. Out: a checked `WavemareConfig` and the
configuration for DeepSpeed. Read `resolve.py` first.
"""
