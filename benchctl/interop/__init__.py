"""Formats of other tools: ``readers/`` reads their results, ``writers/`` writes ours in their form.

``lenvm/`` turns a directory of the LenVM timing scripts into a result directory.
"""
