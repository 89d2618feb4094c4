"""Comparison of two sides, cell by cell and block by block, against a margin.

``compare`` is the pipeline, ``metric`` one metric and its verdict, ``result`` the values, ``words`` their sentences
and warnings; ``answers``, ``attribution`` and ``nodes`` add what lies behind a verdict; ``foreign`` compares result
files of other tools.
"""
