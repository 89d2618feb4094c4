"""The verdict: two sides, matched cell by cell and block by block, judged against a margin.

``compare`` decides, ``result`` holds the values, ``warnings`` what a reader should doubt, ``text`` tells it.
"""
