"""From files and the command line to one mapping of located values: YAML, ``extends``, presets, ``--set``, aliases.

The mapping is not validated here.
"""
