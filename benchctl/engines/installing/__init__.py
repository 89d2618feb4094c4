"""Installation of engines: each into a Python environment of its own, where ``engines.environment`` looks for it.

``recipes`` is the table of packages and versions; ``install`` creates an environment from one of them, by programs
that ``watched`` runs.
"""
