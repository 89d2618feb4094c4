"""Fit of a step-time model to observed steps.

The bootstrap draws whole runs where there are many. Few runs are cut into stretches of consecutive steps, and those
are drawn: single steps would pretend that neighbours are independent. Residuals come from runs, or stretches of an
only run, that a fit to the others did not see.

Typical coefficients (anchors) decide what the data of a fit leave open. A log of one model cannot tell its weights
from its layers: both are the same in every step. Any split of the sum fits that log equally well, and only one
predicts another model. The split nearest to the anchors is taken, measured in their spreads. The ridge lets them
pull on what the data determine, as far as noise leaves it open.

Sources. Weights and layers: vidur's profiles of the linear layers of Llama-2-7B and 70B (H100, TP 1 to 8, 8 to 64
tokens), time of a layer = c bytes / bandwidth + t0 by least squares on relative error: c = 1.19 and t0 = 32 us,
MAPE 3.1 % (A100: 1.33, 36 us, 3.0 %). NVIDIA's aiconfigurator, vLLM 0.14: 1,601 matrix products of up to 64 rows
give c = 1.11 and 4.0 us each, and attention of a small batch 11 to 13 us a layer, which is not among vidur's.
Compute: 1.4 to 2.0 and key-value memory 1.2 to 1.6, the ranges that the published model calls typical. All-reduce:
the latency floor is part of the feature. A row: its logits are read a few times (128,000 values of 32 bits take
0.15 us at the H100's bandwidth), and the host's work for it is hidden behind the step or takes 5 to 20 us. The
published form's own typical values: 1.4 to 2.0, 1.2 to 1.6, and 3 to 5 for all-reduce.

``calibrate`` carries a fitted model to another device by two scalars, from a few steps measured there. The source
model prices each step of the target with the target's peaks. Its price has three parts: P_c bound by arithmetic,
P_m bound by memory, and o (all-reduce, requests, steps), which is taken to be the same. Utilisation differs between
devices, so

    y = o + s_c P_c + s_m P_m,    s_c, s_m = arg min sum (y - o - s_c P_c - s_m P_m)^2

    s_c = (sum P_c u  sum P_m^2  -  sum P_m u  sum P_c P_m) / det
    det = sum P_c^2 sum P_m^2 - (sum P_c P_m)^2,   u = y - o

and s_m likewise. Decode steps alone hardly determine s_c: a few prompts belong to the steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from benchctl import __version__
from benchctl.costs.hardware import Hardware
from benchctl.errors import UsageError
from benchctl.steptime.design import (
    Constraint,
    Design,
    Indices,
    Pull,
    Rows,
    check_design,
    design_of,
    fitted_design,
    identified_columns,
    relative_rows,
    solve,
)
from benchctl.steptime.features import COUNTS
from benchctl.steptime.model import LEVEL, UNSCALED, DataFile, Provenance, StepTimeModel, scatter_at
from benchctl.steptime.work import (
    Coefficient,
    ExpertsRead,
    Floats,
    ObservedSteps,
    Structure,
    distances,
    most_query_tokens,
    range_of,
    stacked,
)

_NUM_BLOCKS: Final = 60
"""Stretches that fewer runs are cut into, all together."""
_RUN_WEIGHT: Final = 10
"""Independent observations that a run counts as when noise decides how far typical values pull: the steps of a run
have nearly the same work for long, and what a model has wrong about one it has wrong about all."""
_NUM_FOLDS: Final = 5
"""Parts of the steps whose residuals come from a fit to the other parts."""
_LEVELS: Final = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
"""The ends of an interval."""


class Anchor(NamedTuple):
    """A typical value of a coefficient, and how far it usually lies from that."""

    value: float
    spread: float


_OVERHEADS: Final = {
    "requests": Anchor(5.0, 10.0),
    # The host's part of guidance differs by orders of magnitude between implementations: hardly a pull.
    "value_model": Anchor(2.0, 2.0),
    "guided_steps": Anchor(5000.0, 20000.0),
    "guided_rows": Anchor(100.0, 1000.0),
    "candidates": Anchor(20.0, 200.0),
}
_CORRECTED: Final = {
    "compute": Anchor(1.6, 0.4),
    "memory": Anchor(1.15, 0.1),
    "all_reduce": Anchor(1.0, 0.5),
    "layers": Anchor(45.0, 15.0),
    "steps": Anchor(100.0, 100.0),
    **_OVERHEADS,
}
_ORIGINAL: Final = {
    "prefill": Anchor(1.7, 0.3),
    "decode": Anchor(1.4, 0.2),
    "static_weights": Anchor(1.3, 0.3),
    "expert_weights": Anchor(1.0, 0.4),
    "all_reduce": Anchor(4.0, 2.0),
    # Without a term for layers, theirs is in that of steps: 20 to 80 layers of 45 us.
    "steps": Anchor(2000.0, 1500.0),
    **_OVERHEADS,
}


def anchor_of(name: str, structure: Structure) -> Anchor:
    """The typical value of a feature's coefficient in a structure. KeyError for the roofline, which has none."""
    return (_ORIGINAL if structure == "original" else _CORRECTED)[name]


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

    A feature of ``names`` that no step has gets its typical coefficient. The roofline is not fitted: every
    coefficient is 1, and residuals say how far steps lie above it.
    Raises UsageError when no step is left, when the runs are of several kinds of device, or when features that vary
    cannot be told apart.
    """
    design = fitted_design(observed, options.structure, options.experts_read, names)
    hardware, is_fitted = one_hardware(design), options.structure != "roofline"
    coefficients, draws = (
        _fitted(design, options)
        if is_fitted
        else (tuple(Coefficient(name=name, value=1.0) for name in design.names), ())
    )
    return StepTimeModel(
        structure=options.structure,
        experts_read=options.experts_read,
        coefficients=coefficients,
        hardware=hardware,
        tensor_parallel=tensor_parallel_of(design),
        draws=draws,
        scatter=_scatter_by_fifths(design.extents[:, 0], _held_out_residuals(design, options)),
        fitted_range=range_of(design.extents),
        growth=_growth_outside(design, options) if is_fitted else 0.0,
        provenance=provenance_of(design, observed, fitted_on),
    )


def _fitted(design: Design, options: FitOptions) -> tuple[tuple[Coefficient, ...], tuple[tuple[float, ...], ...]]:
    """The coefficients with their intervals, and the draws behind these."""
    runs = [np.flatnonzero(design.run_of == run) for run in range(len(design.runs))]
    blocks = design.blocks_of(np.arange(design.num_steps), _NUM_BLOCKS)
    # From so many runs on, the bootstrap draws runs
    rows = relative_rows(design.matrix, design.measured_us, runs if len(runs) >= 10 else blocks)
    if options.ridge is None or options.ridge <= 0:
        check_design(design, rows)
    values, pull = _fit_values(design, rows, options, len(runs))
    draws = _bootstrap(rows, pull, options)
    low, high = np.quantile(draws, _LEVELS, axis=0)
    coefficients = (
        Coefficient(
            name=name,
            value=float(values[i]),
            low=float(low[i]),
            high=float(high[i]),
            unit="us" if name in COUNTS else "",
            is_identified=bool(is_identified),
        )
        for i, (name, is_identified) in enumerate(zip(design.names, identified_columns(rows), strict=True))
    )
    return tuple(coefficients), tuple(tuple(round(value, 9) for value in row) for row in draws.tolist())


def _fit_values(design: Design, rows: Rows, options: FitOptions, num_runs: int) -> tuple[Floats, Pull]:
    """The coefficients of the features of ``rows``, and the pull that was applied."""
    values, spreads = np.array([anchor_of(name, options.structure) for name in design.names]).T
    pull = Pull(values=values, spreads=spreads, strength=options.ridge or 0.0)
    fitted = solve(rows, pull, constraint=options.constraint)
    if options.ridge is not None:
        return fitted, pull
    # The standard deviation of predicted / measured by its median distance from 1: outliers do not count.
    noise = 1.4826 * float(np.median(np.abs(rows.relative @ fitted - 1.0)))
    pull = replace(pull, strength=noise**2 / (_RUN_WEIGHT * num_runs))
    return solve(rows, pull, constraint=options.constraint), pull


def _bootstrap(rows: Rows, pull: Pull, options: FitOptions) -> Floats:
    """Coefficients of each draw, shape (draws, columns).

    Each draw also draws the values that it is pulled to. Directions that the data leave open then vary as far as
    typical values do: the interval of a prediction for another model is as wide as what is not known about it.
    """
    num_blocks = len(rows.counts)
    stream = np.random.default_rng([options.seed, num_blocks])
    shares = np.full(num_blocks, 1 / num_blocks)
    times = stream.multinomial(num_blocks, shares, size=options.num_draws).astype(np.float64)
    values = stream.normal(pull.values, pull.spreads, size=(options.num_draws, len(pull.values)))
    return np.stack(
        [
            solve(rows, replace(pull, values=drawn), constraint=options.constraint, weights=weights)
            for drawn, weights in zip(values, times, strict=True)
        ]
    )


def fit_to(design: Design, steps: Indices, options: FitOptions) -> Floats:
    """The coefficients of a fit to these steps alone; 1 for the roofline."""
    if options.structure == "roofline":
        return np.ones(len(design.names))
    rows = relative_rows(design.matrix, design.measured_us, design.blocks_of(steps, _NUM_BLOCKS))
    return _fit_values(design, rows, options, len(np.unique(design.run_of[steps])))[0]


def _log_residuals(design: Design, fitted_to: Indices, options: FitOptions) -> Floats:
    """log(measured / predicted) of all steps by a fit to some; a prediction of 0 counts as one of a nanosecond."""
    predicted_us = design.matrix @ fit_to(design, fitted_to, options)
    return np.log(design.measured_us / np.maximum(predicted_us, 1e-3))


def _held_out_residuals(design: Design, options: FitOptions) -> Floats:
    """log(measured / predicted) of each step, predicted by a fit that did not see its run, or its part of it."""
    folds, logs = _folds(design), np.empty(design.num_steps)
    for fold in range(_NUM_FOLDS):
        is_left_out = folds == fold
        others = np.flatnonzero(~is_left_out if not is_left_out.all() else is_left_out)
        if is_left_out.any():
            logs[is_left_out] = _log_residuals(design, others, options)[is_left_out]
    return logs


def _folds(design: Design) -> Indices:
    """The fold of each step: whole runs where a deployment has several, else stretches of its only run.

    Whole runs also show how runs of the same work differ, such as two starts of one server.
    """
    folds = np.empty(design.num_steps, dtype=np.intp)
    deployments = [(run.deployment.shape.name, run.deployment.tensor_parallel) for run in design.runs]
    for index, deployment in enumerate(deployments):
        steps = np.flatnonzero(design.run_of == index)
        if deployments.count(deployment) > 1:
            folds[steps] = deployments[:index].count(deployment) % _NUM_FOLDS
            continue
        for fold, part in enumerate(np.array_split(steps, _NUM_FOLDS)):
            folds[part] = fold
    return folds


def _scatter_by_fifths(num_seqs: Floats, logs: Floats) -> tuple[tuple[float, float, float], ...]:
    """For each fifth of steps by their sequences: the most of these, and the ends of the interval of ``logs``."""
    most = np.unique(np.quantile(num_seqs, (0.2, 0.4, 0.6, 0.8, 1.0), method="higher"))
    fifth = np.searchsorted(most, num_seqs)
    return tuple(
        (float(most[i]), *np.quantile(logs[fifth == i], _LEVELS).round(6).tolist()) for i in range(len(most))
    )


def _growth_outside(design: Design, options: FitOptions) -> float:
    """The least growth with which as many steps as ``LEVEL`` says lie in their intervals, outside of a fit's range.

    The half of the steps with the larger values of one extent is predicted by a fit to the other half; the largest
    growth over the extents counts.
    """
    extents, needed = design.extents, [0.0]
    for extent in extents.T:
        is_out = extent > np.median(extent)
        if is_out.any():
            logs = _log_residuals(design, np.flatnonzero(~is_out), options)
            low, high = scatter_at(_scatter_by_fifths(extents[~is_out, 0], logs[~is_out]), extents[is_out, 0])
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


def tensor_parallel_of(design: Design) -> tuple[int, ...]:
    """The tensor-parallel sizes of all runs."""
    return tuple(sorted({run.deployment.tensor_parallel for run in design.runs}))


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


MAX_CONDITION: Final = 1e6
_NUDGE: Final = 1e-6
"""Relative change of a peak that shows which features are bound by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Times bound by arithmetic and by memory on the target, as multiples of the source model's price."""

    compute: float
    memory: float
    condition: float


def solve_scales(compute_us: Floats, memory_us: Floats, overhead_us: Floats, measured_us: Floats) -> Scales:
    """The scales of these steps. Raises UsageError when the steps do not determine both."""
    rest = measured_us - overhead_us
    normal = np.array(
        [[compute_us @ compute_us, compute_us @ memory_us], [compute_us @ memory_us, memory_us @ memory_us]]
    )
    condition = float(np.linalg.cond(normal)) if normal.any() else float("inf")
    if not condition <= MAX_CONDITION:
        part, remedy = (
            ("arithmetic", "prompts of 512 tokens and more")
            if normal[0, 0] < normal[1, 1]
            else ("memory", "decode steps of small batches")
        )
        raise UsageError(
            f"these steps do not determine how {part} scales (condition number {condition:.1e}, at most "
            f"{MAX_CONDITION:.0e} is accepted); add {remedy}"
        )
    compute, memory = np.linalg.solve(normal, np.array([compute_us @ rest, memory_us @ rest]))
    return Scales(compute=float(compute), memory=float(memory), condition=condition)


def calibrate(
    model: StepTimeModel, observed: Sequence[ObservedSteps], *, fitted_on: str | None = None
) -> tuple[StepTimeModel, Scales]:
    """The model on the device of these steps, and the scales. Raises UsageError as ``solve_scales`` does."""
    design = design_of(observed, model.columns)
    hardware = one_hardware(design)
    compute, memory, overhead = (
        np.concatenate(column) for column in zip(*(parts_of(model, run) for run in design.runs), strict=True)
    )
    scales = solve_scales(compute, memory, overhead, design.measured_us)
    if min(scales.compute, scales.memory) <= 0:
        raise UsageError(
            f"the scales are {scales.compute:.3g} and {scales.memory:.3g}, and a time cannot shrink below 0: these "
            "steps do not fit the model; fit a model of its own to them"
        )
    calibrated = replace(
        model,
        hardware=hardware,
        tensor_parallel=tensor_parallel_of(design),
        compute_scale=model.compute_scale * scales.compute,
        memory_scale=model.memory_scale * scales.memory,
        # Two scales of all steps alike teach the coefficients nothing about drafts: their own fit counts.
        provenance=replace(
            provenance_of(design, observed, fitted_on),
            calibrated_from=model.hardware,
            most_query_tokens=model.provenance.most_query_tokens,
        ),
    )
    return calibrated, scales


def parts_of(model: StepTimeModel, run: ObservedSteps) -> tuple[Floats, Floats, Floats]:
    """The price of each step in microseconds: bound by arithmetic, bound by memory, and the rest."""
    device, num_steps = run.deployment.hardware, len(run.duration_us)

    def columns(device: Hardware) -> dict[str, Floats]:
        features = model.columns(run.work, replace(run.deployment, hardware=device))
        return {name: stacked([column], num_steps)[:, 0] for name, column in features.items()}

    base = columns(device)
    faster = columns(replace(device, peak_flops_per_s=device.peak_flops_per_s * (1 + _NUDGE)))
    wider = columns(replace(device, bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * (1 + _NUDGE)))
    parts = np.zeros((3, num_steps))
    for name, value in model.values.items():
        if name in base:
            price, is_scaled = value * base[name], name not in UNSCALED
            compute = price * _responds(base[name], faster[name]) * is_scaled
            memory = price * _responds(base[name], wider[name]) * is_scaled
            parts += np.stack([compute, memory, price - compute - memory])
    return parts[0], parts[1], parts[2]


def _responds(before: Floats, after: Floats) -> Floats:
    """1 where a feature falls as a peak rises, 0 where it does not: -d ln f / d ln peak, which is one of both."""
    elasticity = np.where(before > 0, 1.0 - after / np.where(before > 0, before, 1.0), 0.0) / _NUDGE
    return np.asarray(np.round(np.clip(elasticity, 0.0, 1.0), 3), dtype=np.float64)
