"""Metrics of one run, each with its definition, derived from the run's records.

``table`` is the list of all metrics with unit, formula and direction; ``run_metrics`` derives them.
"""
