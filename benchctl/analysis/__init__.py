"""Analysis of records, as pure functions: from the metrics of one run to the verdict on two sides.

``metrics`` derives the numbers of a run and ``validity`` decides which of them count. ``statistics`` estimates
differences, ``attribution`` divides time into parts, ``experiment`` puts runs side by side, and ``compare`` judges
them. Above these: ``analyzed``, the views of one directory, with its ``findings`` and ``bonus`` tokens;
``foreign``, the files of other tools; ``planning``, how many blocks a difference takes.
"""
