"""``wavemare bench soak``: hours of training with faults injected at random."""
