"""Analysis results as tables, CSV, JSON, pictures and a page; nothing here prints or computes a statistic.

``table`` is the one form of every table, ``export`` writes the files of a report and lists directories, ``charts/``
has the pictures of the page and of files, ``page/`` the page.
"""
