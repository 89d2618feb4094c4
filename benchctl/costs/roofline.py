"""FLOPs and bytes of forward passes, and the least time of a step with and without guidance."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeAlias, TypeVar, get_args

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import ModelShape, Precision, at_least
from benchctl.errors import UsageError
from benchctl.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One pass, or many at once."""


def forward_flops(
    shape: ModelShape, tokens: Quantity, positions: Quantity, heads: Quantity, *, decode_positions: Quantity
) -> Quantity:
    """FLOPs of passes that forward so many tokens; the head is the one that the shape has.

    ``decode_positions`` are those of decoding tokens, ``positions`` all others'.
    """
    attention = positions * shape.attention_flops_per_position()
    attention = attention + decode_positions * shape.decode_attention_flops_per_position()
    return tokens * shape.linear_flops_per_token() + attention + heads * shape.head_flops()


def forward_bytes(shape: ModelShape, kv_tokens: Quantity, tokens: Quantity) -> Quantity:
    """Bytes of passes that forward so many tokens: weights once, and ``kv_tokens`` of key-value cache."""
    read = kv_tokens * shape.kv_bytes_per_token() + weight_read_bytes(shape)
    if shape.moe is None:
        return read
    return read + shape.moe.uniform_experts(tokens) * (shape.expert_params() * shape.param_bytes())


def weight_read_bytes(shape: ModelShape, bytes_per_param: float | None = None) -> int:
    """Weights read once by any pass, whatever its batch: projections without routed experts, and the head.

    The embedding is a gather of a few rows and is not counted, unless it is tied and thus read as the head.
    ``bytes_per_param`` replaces the format of the projections and the 2 bytes of the head.
    """
    head_bytes = 2 if bytes_per_param is None else bytes_per_param
    param_bytes = shape.param_bytes() if bytes_per_param is None else bytes_per_param
    return round(shape.static_params() * param_bytes + shape.head_flops() // 2 * head_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime(Generic[Quantity]):
    """Least time of one forward pass, or of each of many, in seconds.

    ``weights_s`` and ``prefixes_s`` are the times to move weights and key-value cache at the device's bandwidth,
    ``compute_s`` is that of all FLOPs at its peak.
    """

    weights_s: Quantity
    prefixes_s: Quantity
    compute_s: Quantity

    @property
    def excess_compute_s(self) -> Quantity:
        """Time of the FLOPs beyond that of the bytes; 0 where the pass is bound by memory."""
        return at_least(self.compute_s - self.weights_s - self.prefixes_s, 0.0)

    @property
    def floor_s(self) -> Quantity:
        """The larger of both: max(weights + prefixes, compute)."""
        return self.weights_s + self.prefixes_s + self.excess_compute_s


def pass_time(
    shape: ModelShape,
    hardware: Hardware,
    *,
    tokens: Quantity,
    kv_tokens: Quantity,
    positions: Quantity,
    decode_positions: Quantity,
    heads: Quantity,
) -> PassTime[Quantity]:
    """The least time of passes with these counts, at the peaks of ``hardware``."""
    prefix_bytes = kv_tokens * shape.kv_bytes_per_token()
    flops = forward_flops(shape, tokens, positions, heads, decode_positions=decode_positions)
    bandwidth = hardware.bandwidth_bytes_per_s
    return PassTime(
        weights_s=(forward_bytes(shape, kv_tokens, tokens) - prefix_bytes) / bandwidth,
        prefixes_s=prefix_bytes / bandwidth,
        compute_s=flops / hardware.peak_of(shape.precision),
    )


def roofline_ns(flops: float, num_bytes: float, hardware: Hardware, precision: Precision = "bfloat16") -> int:
    """max(flops / peak, bytes / bandwidth), in nanoseconds."""
    return round(max(flops / hardware.peak_of(precision), num_bytes / hardware.bandwidth_bytes_per_s) * NS_PER_S)


Scoring: TypeAlias = Literal["reuse", "recompute", "two-phase"]
"""The way in which prefixes of the value model grow by the token that was drawn."""

LAYER_OPERATIONS: Final = 9
"""Operations that one layer of a value model's pass launches, with benchctl's kernels."""
STEP_OPERATIONS: Final = 23
"""Operations of a guided step beside the layers, with one pass."""
SECOND_PASS_OPERATIONS: Final = 11
"""Those that a second pass adds beside its layers."""
LOGIT_BYTES: Final = 2 * 4
"""Bytes that guidance moves for each logit of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedFloor:
    """Least times of a guided decode step in seconds; ``value`` has the value model's passes in their order.

    Invariant: ``ratio`` is 1 and the sum of ``parts``.
    """

    base: PassTime[float]
    value: tuple[PassTime[float], ...] = ()
    value_tokens: float = 0.0
    """Tokens that go through the value model."""
    sampling_s: float = 0.0
    num_operations: int = 0
    """Operations that guidance launches where its passes are not replayed."""
    launches_s: float = 0.0
    """Time of the host for these beyond that of the device; 0 where they are replayed or unpriced."""

    @property
    def base_s(self) -> float:
        """The base model's decode step, which is the whole step without guidance."""
        return self.base.floor_s

    @property
    def value_s(self) -> float:
        return sum((each.floor_s for each in self.value), 0.0)

    @property
    def step_s(self) -> float:
        """The guided step."""
        return self.base_s + self.value_s + self.sampling_s + self.launches_s

    @property
    def ratio(self) -> float:
        """Guided over unguided step."""
        return self.step_s / self.base_s

    @property
    def parts(self) -> Mapping[str, float]:
        """Share of each cause in the ratio: reading weights and prefixes, arithmetic beyond that, and the rest."""
        times = {
            "weights": sum(each.weights_s for each in self.value),
            "prefixes": sum(each.prefixes_s for each in self.value),
            "arithmetic": sum(each.excess_compute_s for each in self.value),
            "sampling": self.sampling_s,
            "launches": self.launches_s,
        }
        return {cause: time_s / self.base_s for cause, time_s in times.items()}


def guided_floor(
    base: ModelShape,
    value_model: ModelShape,
    hardware: Hardware,
    *,
    batch: int,
    candidates: int,
    context: float,
    scoring: Scoring = "reuse",
    unscored_frac: float = 0.0,
    launch_s: float | None = None,
) -> GuidedFloor:
    """The least time of a decode step of ``batch`` rows with ``context`` tokens each and ``candidates`` to score.

    The value model is charged its value head whatever its shape says. ``unscored_frac`` of the rows need no scores.
    ``launch_s`` is the time that the host needs to launch an operation, None where passes are replayed. Raises
    UsageError for counts out of range.
    """
    _check(batch, candidates, context, scoring, unscored_frac, launch_s)
    length = context + 1  # with the newest token
    base_pass = pass_time(
        base,
        hardware,
        tokens=float(batch),
        kv_tokens=batch * (length + 1),
        positions=0.0,
        decode_positions=batch * length,
        heads=float(batch),
    )
    if candidates == 1:
        return GuidedFloor(base=base_pass)
    scored_rows = batch * (1 - unscored_frac)
    scored, missing = scored_rows * candidates, batch * (unscored_frac if scoring == "reuse" else 1.0)
    passes = [(scored_rows, missing, scored)]
    if scoring == "two-phase":
        passes = [(float(batch), missing, 0.0), (scored_rows, 0.0, scored)]
    shape = value_model.as_value_model()
    value = tuple(_value_pass(shape, hardware, length, *each) for each in passes)
    sampling_s = batch * base.vocab * LOGIT_BYTES / hardware.bandwidth_bytes_per_s
    num_operations = _num_operations(shape, len(value))
    device_s = sampling_s + sum(each.floor_s for each in value)
    return GuidedFloor(
        base=base_pass,
        value=value,
        value_tokens=missing + scored,
        sampling_s=sampling_s,
        num_operations=num_operations,
        launches_s=0.0 if launch_s is None else max(0.0, num_operations * launch_s - device_s),
    )


def _value_pass(
    shape: ModelShape, hardware: Hardware, length: float, rows: float, missing: float, scored: float
) -> PassTime[float]:
    tokens = missing + scored
    return pass_time(
        shape,
        hardware,
        tokens=tokens,
        kv_tokens=rows * length + tokens,
        positions=0.0,
        decode_positions=tokens * length,
        heads=scored,
    )


def _num_operations(shape: ModelShape, num_passes: int) -> int:
    return (
        STEP_OPERATIONS + num_passes * shape.layers * LAYER_OPERATIONS + (num_passes - 1) * SECOND_PASS_OPERATIONS
    )


def _check(
    batch: int, candidates: int, context: float, scoring: str, unscored_frac: float, launch_s: float | None
) -> None:
    for name, number in (("batch", batch), ("candidates", candidates)):
        if number < 1:
            raise UsageError(f"{name} is {number}; a guided step has 1 or more")
    if not context >= 0:
        raise UsageError(f"context is {context}; give the tokens of a prefix, 0 or more")
    if scoring not in get_args(Scoring):
        raise UsageError(f"scoring is {scoring!r}; choose one of {', '.join(get_args(Scoring))}")
    if not 0 <= unscored_frac <= 1:
        raise UsageError(f"unscored_frac is {unscored_frac}; give the share of rows without scores, from 0 to 1")
    if launch_s is not None and not launch_s >= 0:
        raise UsageError(f"launch_s is {launch_s}; give the seconds that the host needs for a launch, 0 or more")
