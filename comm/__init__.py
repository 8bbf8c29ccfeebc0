"""Collectives and what they stand on: the message passing libraries of this machine."""

if __name__ == "comm":  # PyPI has packages of such names, and a second import duplicates classes
    raise ImportError("'comm' is part of wavemare: import 'wavemare.comm' instead")
