"""Verdicts on experiments whose truth is known: error rates, coverage of intervals, and power."""
