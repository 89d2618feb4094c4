"""benchctl: what does a change to the decode path of an LLM server cost, where, and is it real?

Reading guide. Open these files in this order:

1. ``records/run.py`` and ``records/directory.py``: what a result directory holds. Everything before it
   measures, everything after it reads.
2. ``profile/model.py`` and ``profile/plan.py``: what an experiment is, and the order of its runs.
3. ``measure/run.py``: one run, from a fresh server to its last record.
4. ``analysis/metric_table.py`` and ``analysis/metrics.py``: every derived number, its formula, how it is derived.
5. ``analysis/compare.py``: the verdict.

Imports go downwards only: cli, {measure, report, sim, checkpoints}, {analysis, engines}, workload, profile,
records, costs, units, errors. ``docs/architecture.md`` is the map.
"""

__version__ = "0.1.0"
