"""benchctl: what does a change to the decode path of an LLM server cost, where, and is it real?

Reading guide. Open these files in this order:

1. ``records/request.py``, ``step.py``, ``run.py`` and ``directory.py``: a result directory. Everything before it
   measures, everything after it reads.
2. ``profile/model.py`` and ``profile/planning/plan.py``: what an experiment is, and the order of its runs.
3. ``measure/run.py``: one run, from a fresh server to its last record.
4. ``analysis/metrics/table.py`` and ``analysis/metrics/run_metrics.py``: every derived number and its formula.
5. ``analysis/compare/compare.py``: the verdict.

Imports go downwards only; ``docs/architecture.md`` is the map.
"""

__version__ = "0.1.0"
