"""``wavemare bench training``: whole optimizer steps, with gradients summed in several ways."""
