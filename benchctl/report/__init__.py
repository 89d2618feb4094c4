"""Analysis results as tables, CSV, JSON, pictures and a page; nothing here prints or computes a statistic.

``export`` writes a report and ``catalog`` lists directories; ``charts/`` has the pictures of
the page and of files, ``table`` the one form of every table.
"""
