# SPDX-License-Identifier: Apache-2.0
"""``python -m wavemare``: the same as the ``wavemare`` command."""

from wavemare.cli import main

if __name__ == "__main__":
    main()
