"""From YAML to a validated, frozen ``Profile`` with every error at its line, and from it to ordered runs.

``sources`` reads files, ``model`` declares the keys, ``load`` brings them together, ``planning`` makes the runs.
"""
