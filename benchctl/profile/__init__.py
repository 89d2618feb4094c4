"""From YAML to a validated, frozen ``Profile`` with every error at its line, and from it to ordered runs.

``sources`` reads files, ``model`` and ``sections`` declare the keys, ``load`` brings them together, ``planning``
makes the runs.
"""
