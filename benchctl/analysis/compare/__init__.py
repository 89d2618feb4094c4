"""Comparison of two sides, cell by cell and block by block, against a margin.

``compare`` is the pipeline, ``metric`` one metric and its verdict, ``result`` the values, ``words`` their sentences
and warnings; ``cells`` adds what lies behind a verdict: nodes, answers, parts of the time; ``foreign`` compares
result files of other tools.
"""
