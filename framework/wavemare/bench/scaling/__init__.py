"""``wavemare bench scaling``: what a few measured processes say about many."""
