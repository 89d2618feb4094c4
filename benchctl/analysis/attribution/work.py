"""Step time against the least time for its FLOPs and bytes: a roofline model, not a measurement.

Knowledge of a fitted step-time model about the verification of drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from benchctl.analysis.metrics.speculation import drafter_of
from benchctl.analysis.validity.machines import Machine, gpu_names, machines_of
from benchctl.costs.guided_floor import LOGIT_BYTES
from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.costs.roofline import PassTime, pass_time
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.errors import UsageError
from benchctl.formats import count_of
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.columns.columns import Flags, Floats, StepColumns
from benchctl.records.loaded import LoadedResults
from benchctl.records.schema import ResultWarning
from benchctl.records.stores.stores import MeasuredPeaks, hardware_of

if TYPE_CHECKING:
    from benchctl.steptime.model import StepTimeModel


NO_PEAKS: Final = "the peaks of the device are unknown"
NO_SETTINGS: Final = "the profile does not name the models"
_BASE_COUNTS: Final = ("num_prefill_tokens", "num_decode_tokens", "context_tokens")
_VALUE_COUNTS: Final = ("guided_rows", "value_prefill_tokens", "value_extend_tokens", "candidates")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """Models and device of a run's steps.

    ``value`` is None for a run without guidance, ``draft`` without speculation by a model of known shape.
    """

    base: ModelShape
    value: ModelShape | None
    hardware: Hardware
    draft: ModelShape | None = None


class ValueFloor(NamedTuple):
    """Least time of guidance by cause, in seconds."""

    weights_s: float = 0.0
    prefixes_s: float = 0.0
    compute_s: float = 0.0
    """Time of the FLOPs beyond both."""
    sampling_s: float = 0.0

    @property
    def passes_s(self) -> float:
        return self.weights_s + self.prefixes_s + self.compute_s

    def per_step(self, num_steps: int) -> "ValueFloor":
        return ValueFloor(*(time_s / num_steps for time_s in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Least mean time of a step. ``compute_frac`` is the share of it that FLOPs and not bytes determine."""

    base_s: float
    value: ValueFloor
    compute_frac: float
    hardware: str
    draft_s: float = 0.0

    @property
    def value_s(self) -> float:
        """The value model's passes, without the sampling of guidance."""
        return self.value.passes_s

    @property
    def total_s(self) -> float:
        return self.base_s + self.value_s + self.value.sampling_s + self.draft_s


def peaks_of(
    profile: Profile, results: LoadedResults, measured: MeasuredPeaks | None = None
) -> tuple[Hardware | None, tuple[ResultWarning, ...]]:
    """The device that FLOP/s are compared with, and warnings about it.

    A simulated server has the device that its baseline computes for, else that of the profile. Any other ran on the
    GPU of the machine that measured: without one, or with another than the profile's, nothing is compared. A GPU
    that is not in the table counts as the profile's. ``measured`` are the peaks in the result directory, which
    stand for its device's data sheet if they are those of such a machine; a profile that names measured peaks
    itself is taken at its word.
    """
    named = hardware_or_none(profile.hardware)
    if results.manifest.engine == "sim":
        own = variant_settings(profile, profile.baseline, {}).server.simulated_hardware
        return hardware_or_none(own or profile.hardware), ()
    if named is not None and named.measured_at is not None:
        return named, ()
    machines = machines_of(results)
    if measured is not None and _are_of(measured, machines):
        return hardware_of(measured), ()
    devices = {name: hardware_or_none(name) for name in gpu_names(machines)}
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


def _are_of(measured: MeasuredPeaks, machines: Sequence[Machine]) -> bool:
    """True for peaks of one of the machines, or of a device as one of them has it; for older results always."""
    if not any(machine.blocks for machine in machines):
        return True
    return measured.device in gpu_names(machines) or any(measured.host == machine.hostname for machine in machines)


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
    drafter = drafter_of(settings.server)
    return WorkModel(base=base, value=value, hardware=hardware, draft=None if drafter is None else drafter.shape)


def floor_of(columns: StepColumns, work: WorkModel) -> Floor | str:
    """The floor of a run's steps, or the reason why it is unknown."""
    if not len(columns):
        return "there is no step log"
    counts = _counted(columns, _BASE_COUNTS, None)
    if isinstance(counts, str):
        return counts
    base_work = _base_work(columns, counts)
    base_s, base_compute_s = _total_s(_pass_time(base_work, work, work.base))
    value, value_compute_s, draft_s, draft_compute_s = ValueFloor(), 0.0, 0.0, 0.0
    if work.value is not None:
        value_floor = _value_floor(columns, counts[-1], work.value, work)
        if isinstance(value_floor, str):
            return value_floor
        value, value_compute_s = value_floor
    if work.draft is not None:
        draft_s, draft_compute_s = _draft_floor(columns, base_work, work.draft, work)
    n, whole = len(columns), base_s + sum(value) + draft_s
    compute = (base_compute_s + value_compute_s + draft_compute_s) / whole if whole else 0.0
    return Floor(
        base_s=base_s / n,
        value=value.per_step(n),
        draft_s=draft_s / n,
        compute_frac=compute,
        hardware=work.hardware.title,
    )


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


class _Passes(NamedTuple):
    """Counts of one pass in each step."""

    prefill: Floats
    decode: Floats
    """Tokens of decoding rows."""
    context: Floats
    mean_context: Floats
    prompt_positions: Floats
    heads: Floats


def _base_work(columns: StepColumns, counts: Sequence[Floats]) -> _Passes:
    """The base model's pass, which has logits at each draft that it verifies."""
    prefill, decode, context = counts
    drafts, accepted = (_or_zero(columns, name) for name in ("draft_tokens", "accepted_tokens"))
    rows = np.maximum(columns.num_seqs.astype(np.float64), 1.0)
    mean_context = context / rows
    prefill_rows = np.where(prefill > 0, np.maximum(rows - (decode - drafts), 1.0), 1.0)
    new = prefill / prefill_rows
    seen_by_prompt = np.maximum(mean_context - (new - 1) / 2, (new + 1) / 2)
    output = columns.optional("output_tokens")
    heads = rows if output is None else np.where(np.isnan(output), rows, output)
    return _Passes(prefill, decode, context, mean_context, prefill * seen_by_prompt, heads + drafts - accepted)


def _pass_time(counts: _Passes, work: WorkModel, shape: ModelShape) -> PassTime[Floats]:
    """The least times of one pass in each step."""
    tokens = counts.prefill + counts.decode
    return pass_time(
        shape,
        work.hardware,
        tokens=tokens,
        kv_tokens=counts.context + tokens,
        positions=counts.prompt_positions,
        decode_positions=counts.decode * counts.mean_context,
        heads=counts.heads,
    )


def _draft_floor(columns: StepColumns, base: _Passes, shape: ModelShape, work: WorkModel) -> tuple[float, float]:
    """The first pass as the base model's without drafts, the others over equal parts of the other draft tokens."""
    tokens, drafts = _or_zero(columns, "draft_tokens"), _or_zero(columns, "drafts")
    first = base._replace(
        decode=base.decode - tokens, context=base.context - tokens, heads=np.maximum(base.heads - tokens, 0.0)
    )
    first_s, first_compute_s = _total_s(_pass_time(first, work, shape))
    num_more = np.where(drafts > 0, np.ceil(tokens / np.maximum(drafts, 1.0)) - 1, 0.0)
    is_more = num_more > 0
    rows, context = (tokens - drafts)[is_more] / num_more[is_more], base.mean_context[is_more]
    none = np.zeros(len(rows))
    more = _pass_time(_Passes(none, rows, rows * context, context, none, rows), work, shape)
    more_s, more_compute_s = _total_s(more, num_more[is_more])
    return first_s + more_s, first_compute_s + more_compute_s


def _or_zero(columns: StepColumns, name: str) -> Floats:
    values = columns.optional(name)
    return np.zeros(len(columns)) if values is None else np.nan_to_num(values)


def _value_floor(
    columns: StepColumns, context: Floats, shape: ModelShape, work: WorkModel
) -> tuple[ValueFloor, float] | str:
    """Sums over the steps, and the part of them in passes where FLOPs take longer than bytes."""
    greedy = columns.optional("is_greedy")
    rows = columns.optional("guided_rows")
    idle = np.zeros(len(columns)) if greedy is None else np.nan_to_num(greedy)
    if rows is not None:
        idle = np.maximum(idle, np.where(rows == 0, 1.0, 0.0))
    counts = _counted(columns, _VALUE_COUNTS, idle)
    if isinstance(counts, str):
        return counts
    active = counts[0] > 0
    fused = columns.optional("fused")
    is_one_pass = np.ones(len(columns)) if fused is None else np.where(fused == 0, 0.0, 1.0)
    guided, prefill, extend, candidates, together = (values[active] for values in (*counts, is_one_pass))
    if not len(guided):
        return ValueFloor(), 0.0
    mean_context = context[active] / np.maximum(columns.num_seqs[active], 1)

    def times(where: Flags, prefill: Floats, extend: Floats, scored: Floats) -> PassTime[Floats]:
        prefill, extend, scored, rows, length = (
            values[where] for values in (prefill, extend, scored, guided, mean_context)
        )
        tokens = prefill + extend + scored
        return pass_time(
            shape,
            work.hardware,
            tokens=tokens,
            kv_tokens=rows * length + tokens,
            positions=prefill * length / 2,
            decode_positions=(extend + scored) * length,
            heads=scored,
        )

    none, is_split = np.zeros(len(guided)), (together == 0) & (prefill + extend > 0)
    passes = (
        times(~is_split, prefill, extend, candidates),
        times(is_split, prefill, extend, none),
        times(is_split, none, none, candidates),
    )
    row_bytes = LOGIT_BYTES * work.base.vocab
    floor = ValueFloor(
        weights_s=sum(float(each.weights_s.sum()) for each in passes),
        prefixes_s=sum(float(each.prefixes_s.sum()) for each in passes),
        compute_s=sum(float(each.excess_compute_s.sum()) for each in passes),
        sampling_s=float(guided.sum()) * row_bytes / work.hardware.bandwidth_bytes_per_s,
    )
    return floor, sum(_total_s(each)[1] for each in passes)


def _total_s(times: PassTime[Floats], repeats: Floats | float = 1.0) -> tuple[float, float]:
    """Sum over passes of their least time, and the part of it in passes where FLOPs take longer than bytes."""
    is_compute_bound = times.excess_compute_s > 0
    return float((times.floor_s * repeats).sum()), float((times.compute_s * repeats)[is_compute_bound].sum())


def fitted_draft_warnings(model: "StepTimeModel", name: str, num_draft_tokens: int) -> tuple[ResultWarning, ...]:
    """The warning that a model, called ``name``, cannot price the verification of so many draft tokens, or none.

    None for 0 draft tokens, for a fit that saw as many query tokens, and for the roofline, which fits nothing.
    """
    verified_tokens, fitted_tokens = num_draft_tokens + 1, model.provenance.most_query_tokens
    if not num_draft_tokens or model.structure == "roofline":
        return ()
    if fitted_tokens is not None and fitted_tokens >= verified_tokens:
        return ()
    fit = (
        "its file does not say whether the steps of its fit had drafts"
        if fitted_tokens is None
        else f"fitted to steps of at most {count_of(fitted_tokens, 'query token')} for each decoding sequence"
    )
    drafts = count_of(num_draft_tokens, "draft token")
    message = (
        f"{name}: {fit}, and a verification of {drafts} has {verified_tokens}: its time is an extrapolation; fit "
        "the model to steps with as many drafts, or give the costs of drafts as constants ('benchctl speculation' "
        "with --draft-cost and without --model)"
    )
    return (ResultWarning(code="drafts-not-fitted", message=message, where="step-time model"),)
