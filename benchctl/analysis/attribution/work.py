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


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Least mean time of a step in seconds: the base and the draft model's, and that of guidance by cause."""

    base_s: float
    draft_s: float = 0.0
    weights_s: float = 0.0
    prefixes_s: float = 0.0
    compute_s: float = 0.0
    """Time of the value model's FLOPs beyond both."""
    sampling_s: float = 0.0
    hardware: str

    @property
    def value_s(self) -> float:
        """The value model's passes, without the sampling of guidance."""
        return self.weights_s + self.prefixes_s + self.compute_s

    @property
    def total_s(self) -> float:
        return self.base_s + self.value_s + self.sampling_s + self.draft_s


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
    base = _base_passes(columns, counts)
    totals = {"base_s": _total_s(base.times(work.base, work.hardware))}
    if work.value is not None:
        guidance = _guidance_s(columns, counts[-1], work.value, work)
        if isinstance(guidance, str):
            return guidance
        totals |= guidance
    if work.draft is not None:
        totals["draft_s"] = _draft_s(columns, base, work.draft, work.hardware)
    means = {name: total_s / len(columns) for name, total_s in totals.items()}
    return Floor(**means, hardware=work.hardware.title)


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

    def times(self, shape: ModelShape, hardware: Hardware) -> PassTime[Floats]:
        """The least times of the passes."""
        tokens = self.prefill + self.decode
        return pass_time(
            shape,
            hardware,
            tokens=tokens,
            kv_tokens=self.context + tokens,
            positions=self.prompt_positions,
            decode_positions=self.decode * self.mean_context,
            heads=self.heads,
        )


def _base_passes(columns: StepColumns, counts: Sequence[Floats]) -> _Passes:
    """The base model's passes, which have logits at each draft that they verify."""
    prefill, decode, context = counts
    drafts, accepted = (or_zero(columns, name) for name in ("draft_tokens", "accepted_tokens"))
    rows = np.maximum(columns.num_seqs.astype(np.float64), 1.0)
    mean_context = context / rows
    prefill_rows = np.where(prefill > 0, np.maximum(rows - (decode - drafts), 1.0), 1.0)
    new = prefill / prefill_rows
    seen_by_prompt = np.maximum(mean_context - (new - 1) / 2, (new + 1) / 2)
    output = columns.optional("output_tokens")
    heads = rows if output is None else np.where(np.isnan(output), rows, output)
    return _Passes(prefill, decode, context, mean_context, prefill * seen_by_prompt, heads + drafts - accepted)


def or_zero(columns: StepColumns, name: str) -> Floats:
    """An optional field of steps, 0 where it is unknown."""
    values = columns.optional(name)
    return np.zeros(len(columns)) if values is None else np.nan_to_num(values)


def _draft_s(columns: StepColumns, base: _Passes, shape: ModelShape, hardware: Hardware) -> float:
    """The first pass as the base model's without drafts, the others over equal parts of the other draft tokens."""
    tokens, drafts = or_zero(columns, "draft_tokens"), or_zero(columns, "drafts")
    first = base._replace(
        decode=base.decode - tokens, context=base.context - tokens, heads=np.maximum(base.heads - tokens, 0.0)
    )
    num_more = np.where(drafts > 0, np.ceil(tokens / np.maximum(drafts, 1.0)) - 1, 0.0)
    is_more = num_more > 0
    rows, context = (tokens - drafts)[is_more] / num_more[is_more], base.mean_context[is_more]
    none = np.zeros(len(rows))
    more = _Passes(none, rows, rows * context, context, none, rows).times(shape, hardware)
    return _total_s(first.times(shape, hardware)) + _total_s(more, num_more[is_more])


def _guidance_s(
    columns: StepColumns, context: Floats, shape: ModelShape, work: WorkModel
) -> dict[str, float] | str:
    """Sums over the steps by cause, or the reason why they are unknown."""
    greedy, rows, fused = map(columns.optional, ("is_greedy", "guided_rows", "fused"))
    idle = np.zeros(len(columns)) if greedy is None else np.nan_to_num(greedy)
    if rows is not None:
        idle = np.maximum(idle, np.where(rows == 0, 1.0, 0.0))
    counts = _counted(columns, _VALUE_COUNTS, idle)
    if isinstance(counts, str):
        return counts
    active = counts[0] > 0
    is_one_pass = np.ones(len(columns)) if fused is None else np.where(fused == 0, 0.0, 1.0)
    guided, prefill, extend, candidates, together = (values[active] for values in (*counts, is_one_pass))
    if not len(guided):
        return {}
    length = context[active] / np.maximum(columns.num_seqs[active], 1)

    def times(where: Flags, prefill: Floats, extend: Floats, scored: Floats) -> PassTime[Floats]:
        counted = _Passes(prefill, extend + scored, guided * length, length, prefill * length / 2, scored)
        return _Passes(*(values[where] for values in counted)).times(shape, work.hardware)

    none, is_split = np.zeros(len(guided)), (together == 0) & (prefill + extend > 0)
    passes = (
        times(~is_split, prefill, extend, candidates),
        times(is_split, prefill, extend, none),
        times(is_split, none, none, candidates),
    )
    return {
        "weights_s": sum(float(each.weights_s.sum()) for each in passes),
        "prefixes_s": sum(float(each.prefixes_s.sum()) for each in passes),
        "compute_s": sum(float(each.excess_compute_s.sum()) for each in passes),
        "sampling_s": float(guided.sum()) * LOGIT_BYTES * work.base.vocab / work.hardware.bandwidth_bytes_per_s,
    }


def _total_s(times: PassTime[Floats], repeats: Floats | float = 1.0) -> float:
    """Sum over passes of their least time."""
    return float((times.floor_s * repeats).sum())


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
