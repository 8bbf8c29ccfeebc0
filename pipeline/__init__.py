# SPDX-License-Identifier: Apache-2.0
"""Pipeline plans as data: how layers are cut into stages."""

if __name__ == "pipeline":  # a second import would duplicate its classes
    raise ImportError("'pipeline' is part of wavemare: import 'wavemare.pipeline' instead")
