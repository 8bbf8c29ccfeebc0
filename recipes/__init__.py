"""Complete training jobs, one readable file each, with JSON configurations beside it."""

if __name__ == "recipes":  # PyPI has packages of such names, and a second import duplicates classes
    raise ImportError("'recipes' is part of wavemare: import 'wavemare.recipes' instead")
