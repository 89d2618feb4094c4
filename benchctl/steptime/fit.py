"""Fit of a step-time model to observed steps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchctl import __version__
from benchctl.errors import UsageError
from benchctl.steptime.design import (
    Constraint,
    Design,
    Floats,
    Indices,
    Pull,
    Rows,
    check_design,
    fitted_design,
    identified_columns,
    relative_rows,
    solve,
)
from benchctl.steptime.features import COUNTS
from benchctl.steptime.model import LEVEL, DataFile, Provenance, StepTimeModel, scatter_of
from benchctl.steptime.step_counts import distances, most_query_tokens, range_of
from benchctl.steptime.work import Coefficient, ExpertsRead, ObservedSteps, Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A typical value of a coefficient, and how far it usually lies from that."""

    value: float
    spread: float


_OVERHEADS: Final[dict[str, Anchor]] = {
    "requests": Anchor(value=5.0, spread=10.0),
    # The host's part of guidance differs by orders of magnitude between implementations: hardly a pull.
    "value_model": Anchor(value=2.0, spread=2.0),
    "guided_steps": Anchor(value=5000.0, spread=20000.0),
    "guided_rows": Anchor(value=100.0, spread=1000.0),
    "candidates": Anchor(value=20.0, spread=200.0),
}
_CORRECTED: Final[dict[str, Anchor]] = {
    "compute": Anchor(value=1.6, spread=0.4),
    "memory": Anchor(value=1.15, spread=0.1),
    "weights": Anchor(value=1.15, spread=0.1),
    "kv": Anchor(value=1.3, spread=0.3),
    "all_reduce": Anchor(value=1.0, spread=0.5),
    "layers": Anchor(value=45.0, spread=15.0),
    "steps": Anchor(value=100.0, spread=100.0),
    **_OVERHEADS,
}
_ORIGINAL: Final[dict[str, Anchor]] = {
    "prefill": Anchor(value=1.7, spread=0.3),
    "decode": Anchor(value=1.4, spread=0.2),
    "static_weights": Anchor(value=1.3, spread=0.3),
    "expert_weights": Anchor(value=1.0, spread=0.4),
    "all_reduce": Anchor(value=4.0, spread=2.0),
    # Without a term for layers, theirs is in that of steps: 20 to 80 layers of 45 us.
    "steps": Anchor(value=2000.0, spread=1500.0),
    **_OVERHEADS,
}


def anchor_of(name: str, structure: Structure) -> Anchor:
    """The typical value of a feature's coefficient in a structure. KeyError for the roofline, which has none."""
    return (_ORIGINAL if structure == "original" else _CORRECTED)[name]


_RUNS_TO_DRAW: Final = 10
"""From so many runs on, the bootstrap draws runs."""
_NUM_BLOCKS: Final = 60
"""Stretches that fewer runs are cut into, all together."""
_RUN_WEIGHT: Final = 10
"""Independent observations that a run counts as when noise decides how far typical values pull: the steps of a run
have nearly the same work for long, and what a model has wrong about one it has wrong about all."""
_NUM_FOLDS: Final = 5
"""Parts of the steps whose residuals come from a fit to the other parts."""
_LEVELS: Final = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
"""The ends of an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The choices of a fit.

    ``ridge`` is the strength of the pull to typical values. None takes what the noise asks for: its variance over
    the number of independent observations, nothing without noise. 0 leaves only open directions to them.
    """

    structure: Structure = "overlap"
    experts_read: ExpertsRead = "uniform"
    constraint: Constraint = "non-negative"
    ridge: float | None = None
    num_draws: int = 200
    seed: int = 0


def fit_model(
    observed: Sequence[ObservedSteps],
    options: FitOptions = FitOptions(),
    *,
    fitted_on: str | None = None,
    names: Sequence[str] = (),
) -> StepTimeModel:
    """The model of all steps that count; ``fitted_on`` is the date that its provenance states.

    A feature of ``names`` that no step has gets its typical coefficient.
    Raises UsageError when no step is left, when the runs are of several kinds of device, or when features that vary
    cannot be told apart.
    """
    design = fitted_design(observed, options.structure, options.experts_read, names)
    hardware = one_hardware(design)
    if options.structure == "roofline":
        return _unfitted(design, options, hardware, fitted_on)
    rows = _rows_of(design, np.arange(design.num_steps))
    if options.ridge is None or options.ridge <= 0:
        check_design(design, rows)
    values, pull = fit_values(design, rows, options, len(design.runs))
    draws = _bootstrap(rows, pull, options)
    identified = identified_columns(rows)
    low, high = np.quantile(draws, _LEVELS, axis=0)
    coefficients = tuple(
        Coefficient(
            name=name,
            value=float(values[i]),
            low=float(low[i]),
            high=float(high[i]),
            unit="us" if name in COUNTS else "",
            is_identified=bool(identified[i]),
        )
        for i, name in enumerate(design.names)
    )
    return StepTimeModel(
        structure=options.structure,
        experts_read=options.experts_read,
        coefficients=coefficients,
        hardware=hardware,
        tensor_parallel=_tensor_parallel(design),
        draws=tuple(tuple(round(float(value), 9) for value in draw) for draw in draws),
        scatter=scatter_by_fifths(design.extents[:, 0], held_out_residuals(design, options)),
        fitted_range=range_of(design.extents),
        growth=growth_outside(design, options),
        provenance=provenance_of(design, observed, fitted_on),
    )


def fit_values(design: Design, rows: Rows, options: FitOptions, num_runs: int) -> tuple[Floats, Pull]:
    """The coefficients of the features of ``rows``, and the pull that was applied."""
    pull = pull_of(design.names, options.structure, options.ridge or 0.0)
    values = solve(rows, pull, constraint=options.constraint)
    if options.ridge is not None:
        return values, pull
    strength = noise_of(rows.relative @ values) ** 2 / (_RUN_WEIGHT * num_runs)
    pull = replace(pull, strength=strength)
    return solve(rows, pull, constraint=options.constraint), pull


def noise_of(ratios: Floats) -> float:
    """Standard deviation of predicted / measured by its median distance from 1, so that outliers do not count."""
    return 1.4826 * float(np.median(np.abs(ratios - 1.0)))


def pull_of(names: Sequence[str], structure: Structure, ridge: float) -> Pull:
    """The anchors of these features as the values that a ridge pulls to."""
    anchors = [anchor_of(name, structure) for name in names]
    return Pull(
        values=np.array([anchor.value for anchor in anchors]),
        spreads=np.array([anchor.spread for anchor in anchors]),
        strength=ridge,
    )


def fit_to(design: Design, steps: Indices, options: FitOptions) -> Floats:
    """The coefficients of a fit to these steps alone; 1 for the roofline."""
    if options.structure == "roofline":
        return np.ones(len(design.names))
    rows = relative_rows(design.matrix, design.measured_us, design.blocks_of(steps, _NUM_BLOCKS))
    return fit_values(design, rows, options, len(np.unique(design.run_of[steps])))[0]


def held_out_residuals(design: Design, options: FitOptions) -> Floats:
    """log(measured / predicted) of each step, predicted by a fit that did not see its run, or its part of it."""
    folds = _folds(design)
    logs = np.empty(design.num_steps)
    for fold in range(_NUM_FOLDS):
        others, these = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        if len(these):
            values = fit_to(design, others if len(others) else these, options)
            logs[these] = log_residuals(design.matrix[these] @ values, design.measured_us[these])
    return logs


def log_residuals(predicted_us: Floats, measured_us: Floats) -> Floats:
    """log(measured / predicted); a prediction of 0 counts as one of a nanosecond."""
    return np.log(measured_us / np.maximum(predicted_us, 1e-3))


def scatter_by_fifths(num_seqs: Floats, logs: Floats) -> tuple[tuple[float, float, float], ...]:
    """For each fifth of steps by their sequences: the most of these, and the ends of the interval of ``logs``."""
    most = np.unique(np.quantile(num_seqs, (0.2, 0.4, 0.6, 0.8, 1.0), method="higher"))
    fifth = np.searchsorted(most, num_seqs)
    return tuple(
        (float(most[i]), *np.quantile(logs[fifth == i], _LEVELS).round(6).tolist()) for i in range(len(most))
    )


def growth_outside(design: Design, options: FitOptions) -> float:
    """The least growth with which as many steps as ``LEVEL`` says lie in their intervals, outside of a fit's range.

    The half of the steps with the larger values of one extent is predicted by a fit to the other half; the largest
    growth over the extents counts.
    """
    extents, needed = design.extents, [0.0]
    for extent in extents.T:
        is_out = extent > np.median(extent)
        if is_out.any():
            predicted_us = design.matrix @ fit_to(design, np.flatnonzero(~is_out), options)
            logs = log_residuals(predicted_us, design.measured_us)
            low, high = scatter_of(scatter_by_fifths(extents[~is_out, 0], logs[~is_out]), extents[is_out, 0])
            excess = np.maximum(np.maximum(logs[is_out] - high, -logs[is_out] - low), 0.0)
            distance = np.maximum(distances(extents[is_out], range_of(extents[~is_out])).max(axis=1), 1e-9)
            needed.append(float(np.quantile(excess / distance, LEVEL)))
    return max(needed)


def one_hardware(design: Design) -> str:
    """The device of all runs. Raises UsageError where they differ."""
    names = sorted({run.deployment.hardware.name for run in design.runs})
    devices = {run.deployment.hardware.device for run in design.runs}
    if len(names) > 1 and len(devices) == 1:
        raise UsageError(
            f"the runs have several peaks of one device, {' and '.join(names)}: a model is fitted to one of them; "
            "name one with --hardware"
        )
    if len(names) > 1:
        raise UsageError(
            f"the runs are of {' and '.join(names)}: a model is fitted to one kind of device; fit one of them, and "
            "'benchctl steptime calibrate' carries it to another"
        )
    return names[0]


def provenance_of(design: Design, observed: Sequence[ObservedSteps], fitted_on: str | None) -> Provenance:
    """Files, runs and models behind a fit."""
    origins = [run.origin for run in observed if run.origin is not None]
    left_out: dict[str, int] = {}
    for run in observed:
        for reason, number in run.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + number
    return Provenance(
        data=tuple(dict.fromkeys(DataFile(path=origin.path, sha256=origin.sha256) for origin in origins)),
        runs=tuple(run.run for run in design.runs),
        models=tuple(dict.fromkeys(run.deployment.shape.name for run in design.runs)),
        num_steps=design.num_steps,
        steps_left_out=tuple(left_out.items()),
        engine=_joined(origin.engine for origin in origins),
        engine_version=_joined(origin.engine_version for origin in origins),
        clock=_joined(origin.clock for origin in origins),
        fitted_on=fitted_on,
        benchctl_version=__version__,
        most_query_tokens=max(most_query_tokens(run.work) for run in design.runs),
    )


def _joined(values: Iterable[str | None]) -> str | None:
    return " and ".join(dict.fromkeys(value for value in values if value is not None)) or None


def _rows_of(design: Design, steps: Indices) -> Rows:
    runs = list(design.groups_by("run").values())
    blocks = runs if len(runs) >= _RUNS_TO_DRAW else design.blocks_of(steps, _NUM_BLOCKS)
    return relative_rows(design.matrix, design.measured_us, blocks)


def _bootstrap(rows: Rows, pull: Pull, options: FitOptions) -> Floats:
    """Coefficients of each draw, shape (draws, columns).

    Each draw also draws the values that it is pulled to. Directions that the data leave open then vary as far as
    typical values do: the interval of a prediction for another model is as wide as what is not known about it.
    """
    stream = np.random.default_rng([options.seed, rows.num_blocks])
    shares = np.full(rows.num_blocks, 1 / rows.num_blocks)
    times = stream.multinomial(rows.num_blocks, shares, size=options.num_draws).astype(np.float64)
    values = stream.normal(pull.values, pull.spreads, size=(options.num_draws, len(pull.values)))
    return np.stack(
        [
            solve(rows, replace(pull, values=drawn), constraint=options.constraint, weights=weights)
            for drawn, weights in zip(values, times, strict=True)
        ]
    )


def _folds(design: Design) -> Indices:
    """The fold of each step: whole runs where a deployment has several, else stretches of its only run.

    Whole runs also show how runs of the same work differ, such as two starts of one server.
    """
    folds = np.empty(design.num_steps, dtype=np.intp)
    ranks: dict[tuple[str, int], list[int]] = {}
    for index, run in enumerate(design.runs):
        ranks.setdefault((run.deployment.shape.name, run.deployment.tensor_parallel), []).append(index)
    for runs in ranks.values():
        for rank, run_index in enumerate(runs):
            steps = np.flatnonzero(design.run_of == run_index)
            if len(runs) > 1:
                folds[steps] = rank % _NUM_FOLDS
                continue
            for fold, part in enumerate(np.array_split(steps, _NUM_FOLDS)):
                folds[part] = fold
    return folds


def _tensor_parallel(design: Design) -> tuple[int, ...]:
    return tuple(sorted({run.deployment.tensor_parallel for run in design.runs}))


def _unfitted(design: Design, options: FitOptions, hardware: str, fitted_on: str | None) -> StepTimeModel:
    """The analytic bound: every coefficient 1, and residuals that say how far steps lie above it."""
    logs = log_residuals(design.matrix.sum(axis=1), design.measured_us)
    return StepTimeModel(
        structure=options.structure,
        experts_read=options.experts_read,
        coefficients=tuple(Coefficient(name=name, value=1.0) for name in design.names),
        hardware=hardware,
        tensor_parallel=_tensor_parallel(design),
        scatter=scatter_by_fifths(design.extents[:, 0], logs),
        fitted_range=range_of(design.extents),
        provenance=provenance_of(design, design.runs, fitted_on),
    )
