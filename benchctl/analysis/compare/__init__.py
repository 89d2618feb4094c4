"""Comparison of two sides, cell by cell and block by block, against a margin.

``compare`` is the pipeline, ``result`` holds its values, ``warnings`` collects what limits their use, ``text`` puts
them into sentences; ``unpaired`` compares result files of other tools.
"""
