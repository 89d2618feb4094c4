"""Formats of other tools: their results are read, and ours are written in their form.

``lenvm/`` turns a directory of the LenVM timing scripts into a result directory.
"""
