"""FLOPs and bytes of forward passes, and the least time of a decode step with and without guidance.

F = linear T + attention P + head R   (T tokens forwarded, P positions that they see together, R rows with a head)
M = weights + kv K                    (weights are read once, K tokens of key-value cache are read or written)
time >= max(F / peak, M / bandwidth)

A bound and never a measurement: no host, no launches, no norms, and all of the data sheet's peaks. Weights have the
bytes of their format, elements of the cache two. Of experts, those are read that T tokens choose, if each choice is
independent and equally likely (``MoeShape``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeAlias, TypeVar

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import ModelShape, Precision, at_least
from benchctl.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One pass, or many at once."""
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
    param_bytes, head_bytes = (
        (shape.param_bytes(), 2) if bytes_per_param is None else (bytes_per_param, bytes_per_param)
    )
    return round(shape.static_params() * param_bytes + shape.head_flops() // 2 * head_bytes)


def roofline_ns(flops: float, num_bytes: float, hardware: Hardware, precision: Precision = "bfloat16") -> int:
    """max(flops / peak, bytes / bandwidth), in nanoseconds."""
    return round(max(flops / hardware.peak_of(precision), num_bytes / hardware.bandwidth_bytes_per_s) * NS_PER_S)


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
    return PassTime(
        weights_s=(forward_bytes(shape, kv_tokens, tokens) - prefix_bytes) / hardware.bandwidth_bytes_per_s,
        prefixes_s=prefix_bytes / hardware.bandwidth_bytes_per_s,
        compute_s=flops / hardware.peak_of(shape.precision),
    )


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

        ratio = (base + value model + sampling + launches) / base
        base, value model: max(bytes / bandwidth, FLOPs / peak) of each forward pass

    A floor by peaks and no prediction: nothing reaches all of a data sheet's peaks, and how far a server stays
    behind them was not part of it. Measured peaks give a closer one. It holds for steady decode of rows that all
    ask for guidance, each with c tokens in the cache before the step and k candidates. Assumed are

    * weights that are read once by each pass, whatever its batch, in the format of each shape;
    * prefixes that are read once for each row and pass, not once for each candidate, and new tokens that are
      written; elements of two bytes;
    * the share ``unscored_frac`` of the rows needs no scores in a step (one candidate, or too little entropy).
      Their token goes through the value model in a later pass, as a missing one;
    * one pass over the value model, one after the other with the base model on one device. With ``reuse`` it has k
      tokens for each scored row, because the keys and values of the drawn candidate are kept, and the missing
      ones; with ``recompute`` k for each scored row and one missing one for each row; in ``two-phase`` the missing
      ones go in a pass of their own before;
    * logits in float32 that guidance reads once and writes once. The sampler itself is in neither step;
    * at k = 1 no guidance: there is nothing to choose from, and servers take the most probable token.

    Launches count where passes are not replayed as CUDA graphs, ``launch_s`` seconds of the host each: it launches
    the operations of the guidance from the moment at which the base model's logits are there, and what it needs for
    that beyond the time in which the device computes them is added. The value model is charged its value head
    whatever its shape says.
    """
    length = context + 1  # with the newest token

    def decode_pass(shape: ModelShape, rows: float, tokens: float, heads: float) -> PassTime[float]:
        """A pass of so many tokens behind the prefixes of ``rows``."""
        return pass_time(
            shape,
            hardware,
            tokens=tokens,
            kv_tokens=rows * length + tokens,
            positions=0.0,
            decode_positions=tokens * length,
            heads=heads,
        )

    base_pass = decode_pass(base, batch, float(batch), float(batch))
    if candidates == 1:
        return GuidedFloor(base=base_pass)
    scored_rows = batch * (1 - unscored_frac)
    scored, missing = scored_rows * candidates, batch * (unscored_frac if scoring == "reuse" else 1.0)
    passes = [(scored_rows, missing + scored, scored)]
    if scoring == "two-phase":
        passes = [(float(batch), missing, 0.0), (scored_rows, scored, scored)]
    shape = value_model.as_value_model()
    value = tuple(decode_pass(shape, *each) for each in passes)
    sampling_s = batch * base.vocab * LOGIT_BYTES / hardware.bandwidth_bytes_per_s
    num_operations = STEP_OPERATIONS + len(value) * shape.layers * LAYER_OPERATIONS
    num_operations += (len(value) - 1) * SECOND_PASS_OPERATIONS
    device_s = sampling_s + sum(each.floor_s for each in value)
    return GuidedFloor(
        base=base_pass,
        value=value,
        value_tokens=missing + scored,
        sampling_s=sampling_s,
        num_operations=num_operations,
        launches_s=0.0 if launch_s is None else max(0.0, num_operations * launch_s - device_s),
    )
