"""Comparison of two sides, cell by cell and block by block, against a margin.

``compare`` is the pipeline, ``metric`` one metric and its verdict by the rules of ``decide``, ``result`` the
values, ``words`` their sentences and warnings. ``cells`` adds what lies behind a verdict: nodes, parts of the time,
and the answers, whose texts ``judge`` compares and whose ``accuracy`` has the question as its unit.
"""
