"""``python -m wavemare``: the same as the ``wavemare`` command."""

from wavemare.cli import main

if __name__ == "__main__":
    main()
