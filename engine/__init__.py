"""DeepSpeed engine subclasses: initialization, configuration, checkpoints."""

if __name__ == "engine":  # PyPI has packages of such names, and a second import duplicates classes
    raise ImportError("'engine' is part of wavemare: import 'wavemare.engine' instead")
