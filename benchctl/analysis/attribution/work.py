"""The work of a run's steps, from the columns of their log, and the least time of its FLOPs and bytes.

The least time is that of a roofline model, not a measurement. Also the devices of runs, and what a fitted step-time
model knows about the verification of drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from benchctl.analysis.validity.machines import Machine, gpu_names, machines_of
from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.costs.roofline import LOGIT_BYTES, pass_time
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.errors import UsageError
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.records.columns import Flags, Floats, StepColumns
from benchctl.records.loaded import LoadedResults
from benchctl.records.peaks import MeasuredPeaks, hardware_of
from benchctl.records.schema import ResultWarning
from benchctl.steptime.work import Deployment, StepWork, count_step_work
from benchctl.units import count_of

if TYPE_CHECKING:
    from benchctl.steptime.model import StepTimeModel


NO_PEAKS: Final = "the peaks of the device are unknown"
NO_STEPS: Final = "there is no step log"
NO_SETTINGS: Final = "the profile does not name the models"
_BASE_COUNTS: Final = ("num_prefill_tokens", "num_decode_tokens", "context_tokens")
_VALUE_COUNTS: Final = ("guided_rows", "value_prefill_tokens", "value_extend_tokens", "candidates")


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
    if is_virtual(results.manifest.engine):
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


def deployment_of(settings: VariantSettings | None, hardware: Hardware | None) -> Deployment:
    """Models and devices of a run with these settings.

    Raises UsageError, as all functions here, with the reason why they are unknown.
    """
    if settings is None:
        raise UsageError(NO_SETTINGS)
    if hardware is None:
        raise UsageError(NO_PEAKS)
    try:
        base, value = shapes_of(settings)
    except UsageError as error:
        raise UsageError(f"the shape of a model is unknown: {error}") from error
    devices: int = getattr(settings.server, "tensor_parallel_size", 1)
    value = None if value is None else value.as_value_model()
    return Deployment(shape=base, hardware=hardware, tensor_parallel=devices, value_shape=value)


def shapes_of(settings: VariantSettings) -> tuple[ModelShape, ModelShape | None]:
    """The base model, and the value model where requests are guided, not where it is loaded and idle.

    Raises UsageError for a model of unknown shape.
    """
    guided_by = settings.server.guides_with if settings.guidance is not None else None
    return shape_for(settings.model), None if guided_by is None else shape_for(guided_by)


def value_count(columns: StepColumns, name: str) -> Floats | None:
    """A count of the value model's work, 0 in steps without guidance; None if any other step lacks it."""
    missing = np.full(len(columns), np.nan)
    counts, greedy, rows = (
        missing if values is None else values
        for values in map(columns.optional, (name, "is_greedy", "guided_rows"))
    )
    counts = np.where(np.isnan(counts) & ((greedy == 1) | (rows == 0)), 0.0, counts)
    return None if np.isnan(counts).any() else counts


def or_zero(columns: StepColumns, name: str) -> Floats:
    """An optional field of steps, 0 where it is unknown."""
    values = columns.optional(name)
    return np.zeros(len(columns)) if values is None else np.nan_to_num(values)


def _counts(columns: StepColumns, names: Sequence[str]) -> list[Floats]:
    """Counts of all steps. Raises UsageError for one that is unknown."""
    counts = []
    for name in names:
        values = value_count(columns, name) if name in _VALUE_COUNTS else columns.known_values(name)
        if values is None or not len(values) == len(columns) > 0:
            raise UsageError(f"the step log does not count {name} in every step")
        counts.append(values)
    return counts


def work_of(columns: StepColumns) -> StepWork:
    """The work of each step as input of a step-time model. Raises UsageError for steps that do not count it."""
    prefill, decode, context = _counts(columns, _BASE_COUNTS)
    num_seqs, drafts = columns.num_seqs.astype(np.float64), or_zero(columns, "draft_tokens")
    num_decodes = np.minimum(decode - drafts, np.where(prefill > 0, num_seqs - 1.0, num_seqs))
    return count_step_work(
        num_prefills=num_seqs - num_decodes,
        prefill_tokens=prefill,
        num_decodes=num_decodes,
        decode_tokens=decode,
        context_after=context,
        output_tokens=columns.optional("output_tokens"),
        draft_tokens=drafts,
        accepted_tokens=or_zero(columns, "accepted_tokens"),
        guided={name: or_zero(columns, name) for name in _VALUE_COUNTS},
    )


OF_BASE: Final = "base model's"
OF_VALUE: Final = "value model's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Least mean time of a step in seconds by whose work it is; the parts add up to that of the step.

    Beside the models' passes, guidance has a part for sampling, in which it moves logits.
    """

    parts: Mapping[str, float]
    hardware: str

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())


def floor_of(columns: StepColumns, deployment: Deployment, *, draft: ModelShape | None = None) -> Floor:
    """The floor of a run's steps; ``draft`` is the model that drafts, if any.

    Devices that share each layer count as one with the sum of their peaks. Raises UsageError for a log that
    does not count the work.
    """
    if not len(columns):
        raise UsageError(NO_STEPS)
    hardware, value = deployment.hardware, deployment.value_shape
    if deployment.tensor_parallel > 1:
        hardware = hardware.times(deployment.tensor_parallel)
    prefill, decode, context, *guided = _counts(columns, _BASE_COUNTS + (() if value is None else _VALUE_COUNTS))
    base = _base_passes(columns, prefill, decode, context)
    totals_s = dict.fromkeys((OF_BASE, OF_VALUE, "sampling's", "draft model's"), 0.0)
    totals_s[OF_BASE] = base.total_s(deployment.shape, hardware)
    if value is not None:
        totals_s[OF_VALUE] = sum(each.total_s(value, hardware) for each in _value_passes(columns, context, guided))
        logit_bytes = LOGIT_BYTES * deployment.shape.vocab
        totals_s["sampling's"] = float(guided[0].sum()) * logit_bytes / hardware.bandwidth_bytes_per_s
    if draft is not None:
        totals_s["draft model's"] = _draft_s(columns, base, draft, hardware)
    return Floor(
        parts={name: total_s / len(columns) for name, total_s in totals_s.items()}, hardware=hardware.title
    )


class _Passes(NamedTuple):
    """Counts of one pass in each step."""

    prefill: Floats
    decode: Floats
    """Tokens of decoding rows."""
    context: Floats
    mean_context: Floats
    prompt_positions: Floats
    heads: Floats

    def total_s(self, shape: ModelShape, hardware: Hardware, repeats: Floats | float = 1.0) -> float:
        """Sum over the passes of their least time."""
        tokens = self.prefill + self.decode
        times = pass_time(
            shape,
            hardware,
            tokens=tokens,
            kv_tokens=self.context + tokens,
            positions=self.prompt_positions,
            decode_positions=self.decode * self.mean_context,
            heads=self.heads,
        )
        return float((times.floor_s * repeats).sum())


def _base_passes(columns: StepColumns, prefill: Floats, decode: Floats, context: Floats) -> _Passes:
    """The base model's passes, which have logits at each draft that they verify."""
    drafts, accepted = (or_zero(columns, name) for name in ("draft_tokens", "accepted_tokens"))
    rows = np.maximum(columns.num_seqs.astype(np.float64), 1.0)
    mean_context = context / rows
    prefill_rows = np.where(prefill > 0, np.maximum(rows - (decode - drafts), 1.0), 1.0)
    new = prefill / prefill_rows
    seen_by_prompt = np.maximum(mean_context - (new - 1) / 2, (new + 1) / 2)
    output = columns.optional("output_tokens")
    heads = rows if output is None else np.where(np.isnan(output), rows, output)
    return _Passes(prefill, decode, context, mean_context, prefill * seen_by_prompt, heads + drafts - accepted)


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
    more = _Passes(none, rows, rows * context, context, none, rows)
    return first.total_s(shape, hardware) + more.total_s(shape, hardware, num_more[is_more])


def _value_passes(columns: StepColumns, context: Floats, counts: Sequence[Floats]) -> tuple[_Passes, _Passes]:
    """The value model's pass of each guided step, and the second one of steps that are not fused."""
    fused, is_active = columns.optional("fused"), counts[0] > 0
    is_apart = np.zeros(len(columns), dtype=np.bool_) if fused is None else fused == 0
    length = context / np.maximum(columns.num_seqs, 1)
    guided, prefill, extend, candidates = counts
    is_split, none = is_apart & (prefill + extend > 0), np.zeros(len(columns))

    def passes(where: Flags, prefill: Floats, extend: Floats, scored: Floats) -> _Passes:
        counted = _Passes(prefill, extend + scored, guided * length, length, prefill * length / 2, scored)
        return _Passes(*(values[where] for values in counted))

    first = passes(is_active, prefill, extend, np.where(is_split, 0.0, candidates))
    return first, passes(is_active & is_split, none, none, candidates)


def fitted_draft_warnings(model: "StepTimeModel", name: str, num_draft_tokens: int) -> tuple[ResultWarning, ...]:
    """The warning that a model, called ``name``, cannot price the verification of so many draft tokens, or none.

    None for 0 draft tokens, for a fit that saw as many query tokens, and for the roofline, which fits nothing.
    """
    verified_tokens, fitted_tokens = num_draft_tokens + 1, model.provenance.most_query_tokens
    is_fitted = fitted_tokens is not None and fitted_tokens >= verified_tokens
    if is_fitted or not num_draft_tokens or model.structure == "roofline":
        return ()
    fit = (
        "its file does not say whether the steps of its fit had drafts"
        if fitted_tokens is None
        else f"fitted to steps of at most {count_of(fitted_tokens, 'query token')} for each decoding sequence"
    )
    message = (
        f"{name}: {fit}, and a verification of {count_of(num_draft_tokens, 'draft token')} has {verified_tokens}: "
        "its time is an extrapolation; fit the model to steps with as many drafts, or give the costs of drafts as "
        "constants ('benchctl speculation' with --draft-cost and without --model)"
    )
    return (ResultWarning(code="drafts-not-fitted", message=message, where="step-time model"),)
