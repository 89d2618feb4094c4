"""The parts of a guided step that a GPU does with one launch each: their meaning in torch, and their names;
and numbers between host and device, for which neither waits.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from benchctl.guided.modes import ModeBatch, candidate_values, log_tilt


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add ``delta``, if any, to ``x`` [T, hidden], in place; returns the RMS norm times ``weight`` [hidden]."""
    if delta is not None:
        x += delta
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def turn_and_store(
    qkv: Tensor,
    rotations: Tensor,
    positions: Tensor,
    cells: Tensor,
    cache: Tensor,
    norm: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Queries [T, heads, head_dim], turned to their positions; turned keys, and values, go into ``cache``.

    ``qkv`` [T, (heads + 2 kv_heads) * head_dim]; ``rotations`` [positions, 2, head_dim], see
    ``ValueModel.rotations``; ``positions`` and ``cells`` [T]; ``cache`` [cells, 2, kv_heads, head_dim];
    ``norm`` [heads + kv_heads, head_dim] are weights of the norms of queries and keys, where the family has them.
    """
    kv_heads, size = cache.shape[2:]
    by_head = qkv.unflatten(-1, (-1, size))
    query_key, value = by_head[:, :-kv_heads], by_head[:, -kv_heads:]
    if norm is not None:
        query_key = functional.rms_norm(query_key, (size,), None, epsilon) * norm
    cos, sin = rotations.index_select(0, positions)[:, None].unbind(2)
    turned = torch.addcmul(query_key * cos, query_key.roll(size // 2, -1), sin)
    query, key = turned[:, :-kv_heads], turned[:, -kv_heads:]
    cache.index_copy_(0, cells, torch.stack((key, value), dim=1))
    return query.clone()


def tree_attention(
    query: Tensor,
    cache: Tensor,
    starts: Tensor,
    missing: Tensor,
    counts: Tensor,  # noqa: ARG001 - tells kernels where they may end
    slots: Tensor,
    cached: Tensor,
    flat_columns: Tensor,
    cells_per_slot: int,
    columns: int,
    span: int,
) -> Tensor:
    """[T, heads * head_dim]: what each token draws from its row's prefix, the missing tokens before it, and itself.

    ``query`` [T, heads, head_dim] and ``cache`` [cells, 2, kv_heads, head_dim], which holds the keys and values of
    these tokens already; ``columns`` are the most tokens of a row, and ``span`` the most cells; the others as in
    ``layout.Layout``. Query heads that share a key head become columns of their own, so that keys need not be
    repeated.
    """
    rows, kv_heads = starts.shape[0], cache.shape[2]
    group = query.shape[1] // kv_heads
    visible = visible_cells(missing, cached, columns, span)
    mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, -torch.inf)
    mask = mask.repeat_interleave(group, dim=1)[:, None]
    column = torch.arange(columns, device=query.device)
    tokens = (starts[:, None] + column).clamp_max_(query.shape[0] - 1).flatten()
    by_slot = cache.unflatten(0, (-1, cells_per_slot))[:, :span]
    keys, values = by_slot.index_select(0, slots).permute(2, 0, 3, 1, 4)
    by_row = query.unflatten(1, (-1, group)).index_select(0, tokens).unflatten(0, (rows, columns))
    drawn = functional.scaled_dot_product_attention(by_row.permute(0, 2, 1, 3, 4).flatten(2, 3), keys, values, mask)
    by_column = drawn.unflatten(2, (columns, group)).permute(0, 2, 1, 3, 4)
    return by_column.flatten(0, 1).flatten(1).index_select(0, flat_columns)


def visible_cells(missing: Tensor, cached: Tensor, columns: int, span: int) -> Tensor:
    """bool [R, columns, span]: which cells each column of a row sees, of the row's slot."""
    column = torch.arange(columns, device=cached.device)
    cell = torch.arange(span, device=cached.device)
    at = cached[:, None] + column
    limit = cached[:, None] + torch.minimum(column, missing[:, None])
    return (cell < limit[..., None]) | (cell == at[..., None])


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, ffn] of ``gate_up`` [T, 2 * ffn]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def keep_drawn(
    cells: Tensor,
    ids: Tensor,
    unknown: Tensor,
    slots: Tensor,
    cached: Tensor,
    drawn: Tensor,
    cells_per_slot: int,
) -> None:
    """Move the drawn candidate of each row, in all layers, to the end of its prefix.

    ``cells`` [layers, slots * cells_per_slot, 2, kv_heads, head_dim]; ``ids`` [slots, most candidates] are the
    candidates behind each prefix, in the order of their cells; ``slots``, ``cached`` and ``drawn`` [R] as in
    ``layout.Layout``. ``unknown`` [] counts the drawn tokens that were none of these candidates.
    """
    is_moved = drawn >= 0
    matches = ids.index_select(0, slots) == drawn[:, None]
    unknown += (is_moved & ~matches.any(dim=1)).sum()
    # The drawn token is the last cached one, and its candidates began at its cell. Rows without one move the last
    # cell onto itself.
    target = torch.where(is_moved, slots * cells_per_slot + cached - 1, cells.shape[1] - 1)
    source = target + matches.to(torch.int8).argmax(dim=1) * is_moved
    cells.index_copy_(1, target, cells.index_select(1, source))


NUM_LIMITS: Final = 7
SLACK_ULPS: Final = 16
"""A token exactly at a bound is kept, however its probability was rounded on the way."""


def vocabulary_mass(scores: Tensor, top: Tensor, limits: Tensor) -> Tensor:
    """[B, parts], to be added up: exp((score - largest) / temperature) over the vocabulary.

    ``scores`` [B, V] in float32 or float64; ``top`` [B, K] the largest of them, in descending order.
    """
    return torch.exp((scores - top[:, :1]) / _heat(limits, scores.dtype)).sum(dim=1, keepdim=True)


def filter_candidates(top: Tensor, mass: Tensor | None, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [B, K], which columns are candidates [B, K], and how many are to be guided [B].

    See ``candidates.select_candidates``. ``top`` [B, K] as above; ``mass`` is what ``vocabulary_mass`` gives, None
    where every top_p is 1 or more. Nothing is to be guided in rows that may not be, that have a single candidate,
    or whose entropy -sum p ln p in nats is at the threshold or below.
    """
    _, top_k, top_p, min_p, threshold, is_due, _ = limits[:, :, None].unbind(dim=1)
    slack = SLACK_ULPS * torch.finfo(top.dtype).eps
    # Relative to the largest, nothing overflows, and min_p needs no normalisation.
    weights = torch.exp((top - top[:, :1]) / _heat(limits, top.dtype))
    rank = torch.arange(top.shape[1], device=top.device)
    mask = (rank < top_k) | (top_k <= 0)
    mask &= weights * (1 + slack) >= min_p.to(top.dtype)
    if mass is not None:
        shares = weights / mass.sum(dim=1, keepdim=True)
        mass_before = shares.cumsum(dim=1) - shares
        mask &= mass_before <= top_p.to(top.dtype) + slack
    mask |= rank == 0
    mask &= weights > 0
    filtered = weights.masked_fill(~mask, 0)
    probs = filtered / filtered.sum(dim=1, keepdim=True)
    counts = mask.sum(dim=1)
    entropy = -torch.xlogy(probs, probs).sum(dim=1)
    is_open = (is_due[:, 0] > 0) & (counts > 1) & (entropy > threshold[:, 0])
    return probs, mask, counts * is_open


def tilt_candidates(
    probs: Tensor,
    mask: Tensor,
    counts: Tensor,
    ids: Tensor,
    raw: Tensor,
    lines: Tensor,
    ends: Tensor,
    modes: Tensor,
    rules: int,
) -> Tensor:
    """ln p' [B, K], -inf where absent; ln p in rows without a line of ``raw`` or with a count of 0.

    ``probs``, ``mask`` and ``counts`` as ``filter_candidates`` gives them; ``ids`` [B, K]; ``raw`` [lines, K] are
    outputs of the value model's head, ``lines`` [B] which of them is a row's, or -1; ``ends`` are ids of the tokens
    that end an answer; ``rules`` the rules that occur, see ``modes.ModeBatch``.
    """
    raw = raw.index_select(0, lines.clamp_min(0)).to(probs.dtype)
    tilted, _ = log_tilt(probs, candidate_values(raw, ids, ends), raw, mask, ModeBatch(modes, rules))
    is_guided = (counts > 0) & (lines >= 0)
    return torch.where(is_guided[:, None], tilted, torch.log(probs))


def write_candidates(
    logits: Tensor, index: Tensor, ids: Tensor, log_probs: Tensor, counts: Tensor, limits: Tensor
) -> None:
    """Put temperature * ``log_probs`` [B, K] at ``ids``, -inf elsewhere, in rows ``index`` [B] of ``logits``.

    Rows that are neither guided (a count of 0) nor filtered here in any case stay as they are.
    """
    is_kept = ((counts == 0) & (limits[:, -1] == 0))[:, None]
    rows = logits.index_select(0, index)
    scores = (_temperature(limits, log_probs.dtype) * log_probs).to(logits.dtype)
    scores = torch.where(is_kept, rows.gather(1, ids), scores)
    logits.index_copy_(0, index, rows.masked_fill(~is_kept, -torch.inf).scatter(1, ids, scores))


def _temperature(limits: Tensor, dtype: torch.dtype) -> Tensor:
    return limits[:, :1].to(dtype)


def _heat(limits: Tensor, dtype: torch.dtype) -> Tensor:
    """Temperatures [B, 1] to divide by."""
    return _temperature(limits, dtype).clamp_min(torch.finfo(dtype).tiny)


_SCHEMAS: Final = {
    "add_norm": "(Tensor(a!) x, Tensor? delta, Tensor weight, float epsilon) -> Tensor",
    "turn_and_store": (
        "(Tensor qkv, Tensor rotations, Tensor positions, Tensor cells, Tensor(a!) cache, Tensor? norm, "
        "float epsilon) -> Tensor"
    ),
    "tree_attention": (
        "(Tensor query, Tensor cache, Tensor starts, Tensor missing, Tensor counts, Tensor slots, Tensor cached, "
        "Tensor flat_columns, int cells_per_slot, int columns, int span) -> Tensor"
    ),
    "gated": "(Tensor gate_up) -> Tensor",
    "keep_drawn": (
        "(Tensor(a!) cells, Tensor ids, Tensor(b!) unknown, Tensor slots, Tensor cached, Tensor drawn, "
        "int cells_per_slot) -> ()"
    ),
    "vocabulary_mass": "(Tensor scores, Tensor top, Tensor limits) -> Tensor",
    "filter_candidates": "(Tensor top, Tensor? mass, Tensor limits) -> (Tensor, Tensor, Tensor)",
    "tilt_candidates": (
        "(Tensor probs, Tensor mask, Tensor counts, Tensor ids, Tensor raw, Tensor lines, Tensor ends, "
        "Tensor modes, int rules) -> Tensor"
    ),
    "write_candidates": (
        "(Tensor(a!) logits, Tensor index, Tensor ids, Tensor log_probs, Tensor counts, Tensor limits) -> ()"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The operations that guidance is computed with; see the functions of these names."""

    add_norm: Callable[..., Tensor]
    turn_and_store: Callable[..., Tensor]
    tree_attention: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    keep_drawn: Callable[..., None]
    vocabulary_mass: Callable[..., Tensor]
    filter_candidates: Callable[..., tuple[Tensor, Tensor, Tensor]]
    tilt_candidates: Callable[..., Tensor]
    write_candidates: Callable[..., None]
    splits_keys: bool = False
    """``tree_attention`` looks at as many cells as there are; if false, at ``span`` cells of every row."""


NAMES: Final = tuple(each.name for each in fields(Operations) if each.name != "splits_keys")
PLAIN: Final = Operations(
    add_norm=add_norm,
    turn_and_store=turn_and_store,
    tree_attention=tree_attention,
    gated=gated,
    keep_drawn=keep_drawn,
    vocabulary_mass=vocabulary_mass,
    filter_candidates=filter_candidates,
    tilt_candidates=tilt_candidates,
    write_candidates=write_candidates,
)


def _registered() -> tuple[torch.library.Library, Operations]:
    library = torch.library.Library("benchctl", "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, getattr(PLAIN, name), "CompositeExplicitAutograd")
    return library, Operations(**{name: getattr(torch.ops.benchctl, name).default for name in NAMES})


_LIBRARY, FUSED = _registered()


def kernel_operations() -> Operations:
    """The kernels themselves. ImportError where there is no Triton."""
    parts = [importlib.import_module(f"benchctl.guided.kernels.{part}") for part in ("layers", "sampling")]
    kernels = {name: next(getattr(part, name) for part in parts if hasattr(part, name)) for name in NAMES}
    guarded: dict[str, Any] = {name: _on_its_device(kernel) for name, kernel in kernels.items()}
    return Operations(**guarded)


def _on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, whichever its tensors are on."""

    @functools.wraps(kernel)
    def launch(first: Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(first):
            return kernel(first, *others)

    return launch


@functools.cache
def register_kernels() -> None:
    """Let CUDA compute ``FUSED`` by the kernels from now on."""
    kernels = kernel_operations()
    for name in NAMES:
        _LIBRARY.impl(name, getattr(kernels, name), "CUDA")


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


class Arriving:
    """Whole numbers on their way from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            there = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))
            numbers = there
        self._numbers = numbers

    @property
    def is_here(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> list[int]:
        """The numbers; waits for them if necessary."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers
