"""Numbers of one run: what each metric is, and how it is derived from the run's records.

``table`` is the list of all metrics with unit, formula and direction; ``run_metrics`` derives them.
"""
