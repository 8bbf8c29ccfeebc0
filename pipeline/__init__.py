"""Pipeline plans as data: how layers are cut into stages."""

if __name__ == "pipeline":  # PyPI has packages of such names, and a second import duplicates classes
    raise ImportError("'pipeline' is part of wavemare: import 'wavemare.pipeline' instead")
