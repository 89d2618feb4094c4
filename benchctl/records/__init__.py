"""Record types, schema versions and the result directory: the only meeting point of the two halves.

``directory.py`` opens and writes a directory, ``loaded.py`` reads all of it, long files as the arrays of
``columns.py``.
"""
