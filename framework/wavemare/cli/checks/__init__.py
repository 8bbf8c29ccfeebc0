"""The checks of ``wavemare doctor``: one file per subject, functions that yield findings."""
