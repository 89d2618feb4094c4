"""Tables of an experiment: runs as rows, cells as means over blocks, the sweep against its baseline, findings.

The columns are declared in ``columns``; every table, file and picture reads these values.
"""
