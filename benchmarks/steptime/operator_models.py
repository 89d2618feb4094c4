"""Times of single operators: a few non-negative coefficients on what a kernel reads, computes and launches.

``fit_operator`` fits any of them; all-reduces are in ``benchctl/steptime/features.py``.

    time = max(launch, sum of coefficients times columns)

Columns are times at the data sheet's peaks, in microseconds, and counts; coefficients are not negative. ``launch``
is the time of the host for an operator that is measured eagerly: a kernel that ends sooner is not seen. Errors are
relative and their magnitudes are minimised, so that a few stalled measurements do not move the fit.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import LatentShape
from benchctl.errors import UsageError
from benchctl.steptime.work import Floats
from benchctl.units import US_PER_S

_BYTES: Final = 2
"""Bytes of a weight and of an activation."""

_REWEIGHTINGS: Final = 30
_SMALLEST_ERROR: Final = 0.02
"""Relative errors below this count as squares."""
_SOFT_ERROR: Final = 0.05
_SMALLEST_COEFFICIENT: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """Coefficients in the order of the columns; ``launch_us`` is 0 for operators inside a graph."""

    coefficients: tuple[float, ...]
    launch_us: float = 0.0

    def predict_us(self, columns: Floats) -> Floats:
        """Times of operators with these columns (operators, columns), in microseconds."""
        return np.asarray(np.maximum(self.launch_us, columns @ np.array(self.coefficients)), dtype=np.float64)


def fit_operator(columns: Floats, measured_us: Floats, *, has_launch: bool = False) -> OperatorTime:
    """The coefficients of operators with these columns, shape (operators, columns), and measured times.

    Raises UsageError for fewer operators than coefficients.
    """
    if len(measured_us) < columns.shape[1] + has_launch:
        raise UsageError(
            f"{len(measured_us)} measured operators do not determine {columns.shape[1] + has_launch} coefficients; "
            "measure more sizes"
        )
    linear = _least_magnitudes(columns, measured_us)
    if not has_launch:
        return OperatorTime(coefficients=tuple(map(float, linear)))
    return _with_launch(columns, measured_us, linear)


def mape_frac(predicted_us: Floats, measured_us: Floats) -> float:
    """Mean magnitude of predicted / measured - 1."""
    return float(np.mean(np.abs(predicted_us / measured_us - 1)))


def halves(keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """True for every other of the distinct rows of ``keys``, in sorted order: a half to fit to.

    All operators with one key are in the same half.
    """
    _, index = np.unique(np.asarray(keys), axis=0, return_inverse=True)
    return np.asarray(index.ravel() % 2 == 0)


def _least_magnitudes(columns: Floats, measured_us: Floats) -> Floats:
    """Non-negative coefficients with the least mean magnitude of relative errors, by reweighted squares."""
    relative, weights = columns / measured_us[:, None], np.ones(len(measured_us))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTINGS):
        coefficients, _ = nnls(relative * weights[:, None], weights)
        errors = np.abs(relative @ coefficients - 1)
        weights = 1 / np.sqrt(np.maximum(errors, _SMALLEST_ERROR))
    return np.asarray(coefficients, dtype=np.float64)


def _with_launch(columns: Floats, measured_us: Floats, linear: Floats) -> OperatorTime:
    """The same with a least time, on logarithms from two beginnings."""
    launch_us = float(np.median(measured_us[measured_us <= np.quantile(measured_us, 0.4)]))

    def errors(logs: Floats) -> Floats:
        predicted = np.maximum(np.exp(logs[0]), columns @ np.exp(logs[1:]))
        return np.asarray(np.log(predicted / measured_us), dtype=np.float64)

    fits = []
    for first_share in (0.15, 0.6):
        beginning = np.maximum(linear, _SMALLEST_COEFFICIENT)
        beginning[0] *= first_share
        logs = np.log(np.concatenate([[launch_us], beginning]))
        fits.append(least_squares(errors, logs, loss="soft_l1", f_scale=_SOFT_ERROR, max_nfev=400))
    best = np.exp(min(fits, key=lambda fit: float(fit.cost)).x)
    return OperatorTime(coefficients=tuple(map(float, best[1:])), launch_us=float(best[0]))


GEMM_COLUMNS: Final = ("compute", "memory", "kernels")
_TILE_ROWS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gemm:
    """Work of a matrix product: m tokens times weights of k by n.

        compute  2 m' n k / peak,  m' = m rounded up to tiles of 128 rows, if that takes longer than
        memory   (n k + m k + m n) bytes / bandwidth, else this; and one kernel

    Tiles explain most of what a roofline misses between 64 and 512 tokens: 130 tokens cost as much as 256.

    Products of one device, one value for each: m tokens, n outputs, k inputs, in bfloat16.
    """

    m: Floats
    n: Floats
    k: Floats


def gemm_columns(gemm: Gemm, hardware: Hardware) -> Floats:
    """Columns (products, ``GEMM_COLUMNS``) in microseconds and a count of kernels."""
    rows = np.ceil(gemm.m / _TILE_ROWS) * _TILE_ROWS
    compute_us = 2 * rows * gemm.n * gemm.k / hardware.peak_flops_per_s * US_PER_S
    elements = gemm.n * gemm.k + gemm.m * gemm.k + gemm.m * gemm.n
    memory_us = _BYTES * elements / hardware.bandwidth_bytes_per_s * US_PER_S
    is_compute_bound = compute_us > memory_us
    parts = (is_compute_bound * compute_us, ~is_compute_bound * memory_us, np.ones_like(gemm.m))
    return np.stack(parts, axis=1)


LATENT_COLUMNS: Final = ("kernels", "cache", "compute", "io", "context")
_TILE_HEADS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentDecode:
    """Work of a decoding latent attention, absorbed: B rows of H heads against S cached vectors each.

        cache    B S (r + R) bytes / bandwidth
        compute  B H' S 2 (2 r + R) / peak,  H' = heads rounded up to the 16 rows of a tensor-core tile
        io       B H (2 r + R) elements of queries and outputs
        context  S, positions that are walked one after the other where there are too few rows to share
        kernels  1

    The measured module runs eagerly, so that the host's launches are its least time: about 160 us on H100 with vLLM
    0.14.

    Calls of one device, one value for each: rows, heads, and cached tokens of each row.
    """

    rows: Floats
    heads: Floats
    context: Floats


def latent_decode_columns(
    calls: LatentDecode, latent: LatentShape, hardware: Hardware, *, cache_bytes: float = 2.0
) -> Floats:
    """Columns (calls, ``LATENT_COLUMNS``) in microseconds, positions and a count of kernels."""
    byte_us = US_PER_S / hardware.bandwidth_bytes_per_s
    cached = calls.rows * calls.context
    heads = np.ceil(calls.heads / _TILE_HEADS) * _TILE_HEADS
    per_position = latent.absorbed_flops(1)
    parts = (
        np.ones_like(cached),
        cached * latent.cache_elements() * cache_bytes * byte_us,
        cached * heads * per_position / hardware.peak_flops_per_s * US_PER_S,
        calls.rows * calls.heads * per_position / 2 * _BYTES * byte_us,
        calls.context,
    )
    return np.stack(parts, axis=1)


_DRAWS: Final = 24
_SMALL_BLOCK: Final = 16
_LARGE_BLOCK: Final = 32
"""Tokens of one expert that a kernel takes together, for up to as many tokens as experts and for more. Settings of
vLLM lie between 16 and 128."""
_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Experts of the busiest device that tokens reach, and choices that they compute, in whole blocks."""

    experts: float
    padded_choices: float


def power_law_load(tokens: int, experts: int, per_token: int, *, alpha: float, devices: int = 1) -> ExpertLoad:
    """The mean load over draws; ``alpha`` is the exponent (1.01 is mildly, 1.2 clearly uneven).

    Without other devices the quantiles of the law stand for draws. Draws are the same at every call.

    Tokens that an uneven routing sends to each expert, and how many experts it reaches.

    Loads follow a power law: the density of an expert's share x is x^-alpha between a least and a largest share, as
    measured tables of fused kernels assume (aiconfigurator). With n tokens that choose k of N experts, shares lie
    in [1, 0.8 n] if n k > N, else in [0.01, 2], and are scaled to n k in total; loads are whole numbers, at most n,
    and choices lost in rounding go to one expert each.

    With experts on several devices the slowest decides: the device with the largest load of many draws.
    """
    shares = _shares(tokens, experts, per_token, alpha, is_drawn=devices > 1)
    loads = _whole(_scaled(shares, tokens, tokens * per_token), tokens * per_token)
    if devices > 1:
        by_device = loads.reshape(len(loads), devices, -1)
        busiest = by_device.sum(axis=2).argmax(axis=1)
        loads = by_device[np.arange(len(loads)), busiest]
    block = _SMALL_BLOCK if tokens * devices <= experts else _LARGE_BLOCK
    least = min(per_token / devices, 1.0) if devices > 1 else float(per_token)
    return ExpertLoad(
        experts=max(float((loads > 0).sum(axis=1).mean()), least),
        padded_choices=float((np.ceil(loads / block) * block).sum(axis=1).mean()),
    )


def _scaled(shares: Floats, most: float, total: float) -> Floats:
    """Shares scaled to a total, none above ``most``; what is above goes to the others in proportion."""
    loads = shares * (total / shares.sum(axis=1, keepdims=True))
    for _ in range(_ROUNDS):
        is_full = loads >= most
        room = np.where(is_full, 0.0, loads)
        rest = total - most * is_full.sum(axis=1, keepdims=True)
        scaled = room * (rest / np.maximum(room.sum(axis=1, keepdims=True), 1e-9))
        loads = np.where(is_full, most, np.minimum(scaled, most))
    return np.asarray(loads, dtype=np.float64)


def _whole(loads: Floats, total: int) -> Floats:
    """Loads rounded; choices that are lost in rounding go to one expert each, the largest first."""
    rounded = np.round(loads)
    lost = np.maximum(total - rounded.sum(axis=1, keepdims=True), 0)
    rank = np.argsort(np.argsort(-rounded, axis=1, kind="stable"), axis=1)
    return np.asarray(rounded + (rank < lost), dtype=np.float64)


def _shares(tokens: int, experts: int, per_token: int, alpha: float, *, is_drawn: bool) -> Floats:
    """Unscaled shares (draws, experts) by the inverse of the law's distribution."""
    low, high = (1.0, 0.8 * tokens) if tokens * per_token > experts else (0.01, 2.0)
    high = max(high, low * 1.0001)
    if is_drawn:
        quantiles = np.random.default_rng([experts, _DRAWS]).random((_DRAWS, experts))
    else:
        quantiles = ((np.arange(experts) + 0.5) / experts)[None, :]
    power = 1 - alpha
    return np.asarray(((high**power - low**power) * quantiles + low**power) ** (1 / power), dtype=np.float64)


EXPERT_COLUMNS: Final = ("kernels", "weights", "tuned", "untuned", "rows", "experts")
_TUNED_OF_EIGHT: Final = ((8, 1792), (8, 2048), (8, 3584), (8, 4096), (8, 7168))
TUNED: Final[dict[str, frozenset[tuple[int, int]]]] = {
    "h100-sxm": frozenset({*_TUNED_OF_EIGHT, (128, 192), (128, 928), (128, 1856), (256, 512)}),
    "a100-sxm": frozenset({*_TUNED_OF_EIGHT, (128, 192)}),
}
"""Experts on a device and their width, with tuned bfloat16 kernels in vLLM 0.14. Source: its folder
``fused_moe/configs``, as far as measured times confirm it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertBlock:
    """Work of a fused block of experts on one device, with n tokens, k choices each, and width w = d_e / TP.

        weights   experts reached times 3 d w bytes / bandwidth
        tuned     choices in whole blocks times 6 d w FLOPs / peak, where a tuned kernel has this width,
        untuned   else this
        rows      n k (d + 2 w) bytes / bandwidth: each choice is gathered, and also written elsewhere
        experts   N, which the alignment of tokens to experts walks over
        kernels   1

    A width without a tuned kernel costs about three times the compute: vLLM has files of settings by experts and
    width for each device, and defaults for all others.

    Calls, one value for each. ``tensor_parallel`` devices divide each expert, ``expert_parallel`` the set.
    """

    tokens: npt.NDArray[np.int64]
    hidden: Floats
    expert_ffn: Floats
    experts: npt.NDArray[np.int64]
    experts_per_token: npt.NDArray[np.int64]
    tensor_parallel: npt.NDArray[np.int64]
    expert_parallel: npt.NDArray[np.int64]
    alpha: Floats
    """Exponent of the power law that the routing follows."""


def expert_block_columns(block: ExpertBlock, hardware: Hardware) -> Floats:
    """Columns (calls, ``EXPERT_COLUMNS``) in microseconds and counts. Weights are bfloat16."""
    flop_us = US_PER_S / hardware.peak_flops_per_s
    byte_us = _BYTES * US_PER_S / hardware.bandwidth_bytes_per_s
    width = block.expert_ffn / block.tensor_parallel
    loads = _loads(block)
    expert_params = 3 * block.hidden * width
    padded_choices = np.array([load.padded_choices for load in loads])
    compute_us = padded_choices * 2 * expert_params * flop_us
    is_tuned = _is_tuned(block, width, hardware)
    parts = (
        np.ones_like(width),
        np.array([load.experts for load in loads]) * expert_params * byte_us,
        compute_us * is_tuned,
        compute_us * ~is_tuned,
        block.tokens * block.experts_per_token * (block.hidden + 2 * width) * byte_us,
        block.experts.astype(np.float64),
    )
    return np.stack(parts, axis=1)


def _loads(block: ExpertBlock) -> list[ExpertLoad]:
    @cache
    def load(tokens: int, experts: int, per_token: int, devices: int, alpha: float) -> ExpertLoad:
        return power_law_load(tokens, experts, per_token, alpha=alpha, devices=devices)

    columns = (block.tokens, block.experts, block.experts_per_token, block.expert_parallel, block.alpha)
    return [load(*call) for call in zip(*(column.tolist() for column in columns), strict=True)]


def _is_tuned(block: ExpertBlock, width: Floats, hardware: Hardware) -> npt.NDArray[np.bool_]:
    tuned = TUNED.get(hardware.device, frozenset())
    experts = block.experts // block.expert_parallel
    return np.array([call in tuned for call in zip(experts.tolist(), width.tolist(), strict=True)])
