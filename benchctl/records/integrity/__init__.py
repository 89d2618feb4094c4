"""Digests of the files of a result directory, and the check that nothing changed since it was measured."""
