# SPDX-License-Identifier: Apache-2.0
"""From a model's annotations, or a file, to the `Layout` that all ranks agree on.

Scopes and name patterns become regions, regions become a layout, and the layout becomes a
configuration; read ``execute.py`` first.
"""
