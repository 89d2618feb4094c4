"""From YAML to a validated, frozen ``Profile`` with every error at its line, and from it to ordered runs.

``layers`` reads files, ``model`` declares the keys, ``load`` brings them together and resolves the settings of
every arm (``settings``), ``planning`` makes the runs.
"""
