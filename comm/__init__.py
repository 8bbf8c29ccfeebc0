"""Collectives and what they stand on: the message passing libraries of this machine."""

if __name__ == "comm":  # a second import would duplicate its classes
    raise ImportError("'comm' is part of wavemare: import 'wavemare.comm' instead")
