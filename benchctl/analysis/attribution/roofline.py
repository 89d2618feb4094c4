"""Step time against the least time for its FLOPs and bytes: a roofline model, not a measurement.

floor of a step = max(F / peak, M / bandwidth) of the base model + the same of the value model's pass if rows were
guided (``costs/roofline.py``). With T new tokens in a batch of mean context c, P = Σ T c for decoding and T (c -
(T_p - 1) / 2) for prompts of T_p new tokens each; the log has no finer count, and attention is about one percent of
the whole. The base model writes its new tokens: K = context + T. The value model reads the guided rows' contexts
and writes its own T = prefill + extend + candidates; prefixes are as long as the mean row.

The difference of the floors is explained by more FLOPs and bytes; the rest is launches, host work, synchronisation
and kernels below the peaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchctl.analysis.attribution.estimate import Contribution, PairDesign, estimate_levels
from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.costs.roofline import forward_bytes, forward_flops
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.errors import UsageError
from benchctl.profile.model import Profile, VariantSettings
from benchctl.records.columns.step_columns import Floats, StepColumns
from benchctl.records.manifest import Manifest
from benchctl.records.peaks import MeasuredPeaks, hardware_of
from benchctl.records.record import ResultWarning

NO_PEAKS: Final = "the peaks of the device are unknown"
NO_SETTINGS: Final = "the profile does not name the models"
_BASE_COUNTS: Final = ("num_prefill_tokens", "num_decode_tokens", "context_tokens")
_VALUE_COUNTS: Final = ("guided_rows", "value_prefill_tokens", "value_extend_tokens", "candidates")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """Models and device of a run's steps. ``value`` is None for a run without guidance."""

    base: ModelShape
    value: ModelShape | None
    hardware: Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Least mean time of a step. ``compute_frac`` is the share of it that FLOPs and not bytes determine."""

    base_s: float
    value_s: float
    compute_frac: float
    hardware: str

    @property
    def total_s(self) -> float:
        return self.base_s + self.value_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSplit:
    """Mean time of a step: ``base`` and ``value`` model at their floors and the ``rest`` add up to ``whole``.

    ``hardware`` names the device whose peaks the model uses, and says when they were measured if they were.
    """

    whole: Contribution
    base: Contribution
    value: Contribution
    rest: Contribution
    hardware: str
    a_compute_frac: float
    b_compute_frac: float

    @property
    def parts(self) -> tuple[Contribution, ...]:
        return self.base, self.value, self.rest

    @property
    def work(self) -> Contribution:
        """Both models at their floors."""
        return Contribution(name="FLOPs and bytes", added_s=self.base.added_s + self.value.added_s)

    @property
    def unexplained_frac(self) -> float | None:
        """Share of the difference that neither FLOPs nor bytes explain; None without a difference."""
        return self.rest.share_of(self.whole)


def peaks_of(
    profile: Profile, manifest: Manifest, measured: MeasuredPeaks | None = None
) -> tuple[Hardware | None, tuple[ResultWarning, ...]]:
    """The device that FLOP/s are compared with, and warnings about it.

    A simulated server has the device of the profile. Any other ran on the machine's own GPU: without one, or with
    another than the profile's, nothing is compared. A GPU that is not in the table counts as the profile's.
    ``measured`` are the peaks in the result directory, which stand for its device's data sheet; a profile that
    names measured peaks itself is taken at its word.
    """
    named = hardware_or_none(profile.hardware)
    if manifest.engine == "sim" or (named is not None and named.measured_at is not None):
        return named, ()
    if measured is not None:
        return hardware_of(measured), ()
    devices = {gpu.name: hardware_or_none(gpu.name) for gpu in manifest.gpus}
    if not devices or named is None:
        return None, ()
    others = [f"{name} ({device.name})" for name, device in devices.items() if device and device != named]
    if others:
        message = (
            f"the profile says {named.name} and the machine has {', '.join(others)}: FLOP/s are compared with no "
            "peak; set hardware to the machine's own"
        )
        return None, (ResultWarning(code="hardware-differs", message=message, where="hardware"),)
    unknown = [name for name, device in devices.items() if device is None]
    message = (
        f"{', '.join(unknown)}: not in the table of devices; FLOP/s are compared with the peaks of {named.name}, "
        "as the profile says"
    )
    return named, (ResultWarning(code="hardware-unknown", message=message, where="hardware"),) if unknown else ()


def work_model(settings: VariantSettings | None, hardware: Hardware | None) -> WorkModel | str:
    """The work model of a run with these settings, or the reason why there is none.

    Devices that share each layer count as one with the sum of their peaks.
    """
    if settings is None:
        return NO_SETTINGS
    if hardware is None:
        return NO_PEAKS
    guided_by = settings.server.guides_with if settings.guidance is not None else None
    try:
        base = shape_for(settings.model)
        value = None if guided_by is None else shape_for(guided_by).as_value_model()
    except UsageError as error:
        return f"the shape of a model is unknown: {error}"
    devices: int = getattr(settings.server, "tensor_parallel_size", 1)
    if devices > 1:
        hardware = hardware.times(devices)
    return WorkModel(base=base, value=value, hardware=hardware)


def floor_of(columns: StepColumns, work: WorkModel) -> Floor | str:
    """The floor of a run's steps, or the reason why it is unknown."""
    if not len(columns):
        return "there is no step log"
    counts = _counted(columns, _BASE_COUNTS, None)
    if isinstance(counts, str):
        return counts
    base_s, base_compute_s = _base_floor(columns, counts, work)
    value_s = value_compute_s = 0.0
    if work.value is not None:
        value_floor = _value_floor(columns, counts[-1], work.value, work)
        if isinstance(value_floor, str):
            return value_floor
        value_s, value_compute_s = value_floor
    n, whole = len(columns), base_s + value_s
    compute = (base_compute_s + value_compute_s) / whole if whole else 0.0
    return Floor(base_s=base_s / n, value_s=value_s / n, compute_frac=compute, hardware=work.hardware.title)


def _counted(columns: StepColumns, names: Sequence[str], idle: Floats | None) -> list[Floats] | str:
    """Counts of all steps; unknown ones of ``idle`` steps are 0."""
    counts = []
    for name in names:
        column = columns.optional(name)
        values = np.full(len(columns), np.nan) if column is None else column
        if idle is not None:
            values = np.where(np.isnan(values) & (idle > 0), 0.0, values)
        if np.isnan(values).any():
            return f"the step log does not count {name} in every step"
        counts.append(values)
    return counts


def _base_floor(columns: StepColumns, counts: Sequence[Floats], work: WorkModel) -> tuple[float, float]:
    prefill, decode, context = counts
    rows = np.maximum(columns.num_seqs.astype(np.float64), 1.0)
    mean_context = context / rows
    prefill_rows = np.where(prefill > 0, np.maximum(rows - decode, 1.0), 1.0)
    new = prefill / prefill_rows
    seen_by_prompt = np.maximum(mean_context - (new - 1) / 2, (new + 1) / 2)
    output = columns.optional("output_tokens")
    heads = rows if output is None else np.where(np.isnan(output), rows, output)
    tokens = prefill + decode
    flops = forward_flops(
        work.base, tokens, prefill * seen_by_prompt, heads, decode_positions=decode * mean_context
    )
    return _roofline_s(flops, forward_bytes(work.base, context + tokens, tokens), work, work.base)


def _value_floor(
    columns: StepColumns, context: Floats, shape: ModelShape, work: WorkModel
) -> tuple[float, float] | str:
    greedy = columns.optional("is_greedy")
    rows = columns.optional("guided_rows")
    idle = np.zeros(len(columns)) if greedy is None else np.nan_to_num(greedy)
    if rows is not None:
        idle = np.maximum(idle, np.where(rows == 0, 1.0, 0.0))
    counts = _counted(columns, _VALUE_COUNTS, idle)
    if isinstance(counts, str):
        return counts
    active = counts[0] > 0
    guided, prefill, extend, candidates = (values[active] for values in counts)
    if not len(guided):
        return 0.0, 0.0
    mean_context = context[active] / np.maximum(columns.num_seqs[active], 1)
    tokens = prefill + extend + candidates
    decode_positions = (extend + candidates) * mean_context
    flops = forward_flops(shape, tokens, prefill * mean_context / 2, candidates, decode_positions=decode_positions)
    return _roofline_s(flops, forward_bytes(shape, guided * mean_context + tokens, tokens), work, shape)


def _roofline_s(flops: Floats, num_bytes: Floats, work: WorkModel, shape: ModelShape) -> tuple[float, float]:
    """Sum over passes of the larger of both times, and the part of it in passes where FLOPs take longer."""
    compute_s = flops / work.hardware.peak_of(shape.precision)
    memory_s = num_bytes / work.hardware.bandwidth_bytes_per_s
    return float(np.maximum(compute_s, memory_s).sum()), float(compute_s[compute_s > memory_s].sum())


@dataclass(frozen=True, slots=True)
class FlooredRun:
    """Mean step time of a run and its floor."""

    step_s: float
    floor: Floor


def split_work(a: Sequence[FlooredRun], b: Sequence[FlooredRun], design: PairDesign) -> WorkSplit:
    """The difference of mean step times, by model: more FLOPs and bytes, and the rest."""

    def values(run: FlooredRun) -> tuple[float, ...]:
        return run.step_s, run.floor.base_s, run.floor.value_s, run.step_s - run.floor.total_s

    names = ("step", "base model's FLOPs and bytes", "value model's FLOPs and bytes", "rest")
    whole, base, value, rest = estimate_levels(names, a, b, values, design)
    return WorkSplit(
        whole=whole,
        base=base,
        value=value,
        rest=rest,
        hardware=" and ".join(sorted({run.floor.hardware for run in (*a, *b)})),
        a_compute_frac=float(np.mean([run.floor.compute_frac for run in a])),
        b_compute_frac=float(np.mean([run.floor.compute_frac for run in b])),
    )
