"""From YAML to a validated, frozen ``Profile`` with every error at its line, and from it to ordered runs.

``files`` reads profiles and lays them over one another, ``model`` declares the keys, ``load`` validates and
resolves the settings of every arm (``settings``), ``planning`` makes the runs.
"""
