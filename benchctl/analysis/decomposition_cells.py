"""Every cell of a comparison with its decomposition."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchctl.analysis.accounts import Accounts, open_accounts
from benchctl.analysis.comparison import CellComparison
from benchctl.analysis.decomposition import decompose
from benchctl.analysis.decomposition_estimate import Facing
from benchctl.analysis.decomposition_run import RunAnatomy, anatomy_of
from benchctl.analysis.decomposition_work import work_model
from benchctl.analysis.metric_comparison import BlockDesign
from benchctl.analysis.pairing import CellPair
from benchctl.records.directory import LoadedResults, LoadedRun

MetricsOfRun = Mapping[int, Mapping[str, float | None]]
"""The metrics of each run, by the identity of the loaded run."""


def with_decompositions(
    cells: Sequence[CellComparison],
    pairs: Sequence[tuple[CellPair, BlockDesign]],
    sides: tuple[LoadedResults, LoadedResults],
    metrics_of: MetricsOfRun,
    confidence: float,
) -> tuple[CellComparison, ...]:
    """``cells`` in the order of their ``pairs``; a run that serves several cells is read once."""
    a, b = sides
    a_accounts = open_accounts(a)
    b_accounts = a_accounts if a is b else open_accounts(b)
    anatomies = _anatomies([run for pair, _ in pairs for run in pair.a_runs], a_accounts, metrics_of)
    anatomies |= _anatomies([run for pair, _ in pairs for run in pair.b_runs], b_accounts, metrics_of)
    found = []
    for cell, (pair, design) in zip(cells, pairs, strict=True):
        a_runs, b_runs = ([anatomies[id(run)] for run in runs] for runs in (pair.a_runs, pair.b_runs))
        is_paired = pair.pairing != "unpaired"
        facing = Facing(
            is_paired=is_paired,
            confidence=confidence,
            places=design.positions,
            evidence=_evidence(a_runs, b_runs) if is_paired and _is_robust(cell) else None,
        )
        decomposition = decompose(cell.label, a_runs, b_runs, facing, a.manifest.stop)
        found.append(replace(cell, decomposition=decomposition))
    return tuple(found)


def _is_robust(cell: CellComparison) -> bool:
    """Whether blocks that lie far off count little in this cell."""
    return any(metric.estimate is not None and metric.estimate.estimator == "robust" for metric in cell.metrics)


def _evidence(a: Sequence[RunAnatomy], b: Sequence[RunAnatomy]) -> tuple[float, ...]:
    """Log-ratio of the wall times, block by block; not a number where one is unknown."""
    return tuple(
        math.log(y.wall_s / x.wall_s) if x.wall_s and y.wall_s else math.nan for x, y in zip(a, b, strict=True)
    )


def _anatomies(runs: Sequence[LoadedRun], accounts: Accounts, metrics_of: MetricsOfRun) -> dict[int, RunAnatomy]:
    return {
        key: anatomy_of(run, metrics_of[key], work_model(accounts.settings(run.record), accounts.hardware))
        for key, run in {id(run): run for run in runs}.items()
    }
