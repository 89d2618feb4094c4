"""Analysis of records, as pure functions: from the metrics of one run to the verdict on two sides.

``metrics`` derives the numbers of a run and ``validity`` decides which of them count. ``statistics`` estimates
differences, ``attribution`` and ``quality`` divide and judge them, and ``experiment`` puts runs side by side for
``summary``, ``compare`` and ``planning``.
"""
