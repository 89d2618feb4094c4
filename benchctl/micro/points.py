"""The points of a micro-benchmark, and the profile of the experiment that measures them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from benchctl.costs.shapes import shape_for
from benchctl.profile.choices import DataType, ForwardPoint, KvLayout, Mode, Phase
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import Profile
from benchctl.records.schema import Cell

DEFAULT_BLOCKS: Final = 8
DEFAULT_REPLAYS: Final = 200
PRIMARY_METRICS: Final = ("p50_step_ms",)
"""The median of a block's replays: a pass that the host interrupts moves a mean and not a median."""
_POINT_SETTINGS: Final = ("mode", "phase", "batch_size", "length", "new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """Settings that all points of an experiment share, and how often each is measured."""

    model: str
    device: str
    dtype: DataType
    modes: Sequence[Mode]
    """The first is the baseline."""
    kv_layout: KvLayout = "contiguous"
    hardware: str | None = None
    """Name of the device in the table of hardware, if it is there."""
    python: str | None = None
    threads: int | None = None
    """Threads of an operator on a CPU; None on a GPU, and for torch's own choice."""
    blocks: int = DEFAULT_BLOCKS
    replays: int = DEFAULT_REPLAYS
    """Of each point and mode over all blocks; rounded up to as many in each."""
    seed: int = 0


def grid_of_points(
    phases: Sequence[Phase], batch_sizes: Sequence[int], contexts: Sequence[int], prompts: Sequence[int]
) -> tuple[ForwardPoint, ...]:
    """Decodes behind each context and prefills of each prompt, at every batch size."""
    points: list[ForwardPoint] = []
    for phase in phases:
        lengths = contexts if phase == "decode" else prompts
        for length, batch_size in product(lengths, batch_sizes):
            tokens = {"context_tokens": length} if phase == "decode" else {"new_tokens": length}
            points.append(ForwardPoint(phase=phase, batch_size=batch_size, **tokens))
    return tuple(dict.fromkeys(points))


def forward_profile(settings: PassSettings, points: Sequence[ForwardPoint], name: str = "forward") -> Profile:
    """The experiment ``micro-<name>-<model>`` of these points in all modes.

    Every mode is a variant, the first of them the baseline, and every point a cell; each cell of a variant is
    compared with the same cell of the baseline. Raises ProfileError for values that make no experiment.
    """
    cells = cells_of_points(points)
    sweep = {factor: list(dict.fromkeys(cell[factor] for cell in cells)) for factor in cells[0]}
    name = f"micro-{name}-{_slug(shape_for(settings.model).name)}"
    plain: dict[str, Any] = {
        "name": name,
        "description": f"forward passes of {settings.model} with random weights on {settings.device}",
        "seed": settings.seed,
        "blocks": settings.blocks,
        "model": settings.model,
        "engine": {"kind": "micro", "options": _engine_options(settings)},
        "workload": {"dataset": "none", "num_warmups": 0, "arrival": {"kind": "burst"}},
        "variants": {mode: {"server": {"mode": mode}} for mode in settings.modes},
        "baseline": settings.modes[0],
        "sweep": sweep,
        "cells": [dict(cell) for cell in cells],
        "sweep_baseline": True,
        "allowed_differences": [f"server.{setting}" for setting in _POINT_SETTINGS],
        "primary_metrics": list(PRIMARY_METRICS),
    }
    if settings.hardware is not None:
        plain["hardware"] = settings.hardware
    return profile_from_plain(plain, f"benchctl micro ({name})")


def cells_of_points(points: Sequence[ForwardPoint]) -> tuple[Cell, ...]:
    """The cell of each point, in options of the engine ``micro``.

    ``length`` is the context of a decode and the prompt of a prefill. Where some prefill has a context, it is the
    context of all, and ``new_tokens`` says how many tokens follow.
    """
    names_new_tokens = any(point.phase == "prefill" and point.context_tokens for point in points)
    cells: list[Cell] = []
    for point in points:
        is_of_context = names_new_tokens or point.phase == "decode"
        cell: Cell = {"phase": point.phase, "batch_size": point.batch_size}
        cell["length"] = point.context_tokens if is_of_context else point.new_tokens
        cells.append({**cell, "new_tokens": point.new_tokens} if names_new_tokens else cell)
    return tuple(cells)


def _engine_options(settings: PassSettings) -> dict[str, Any]:
    options = {
        "device": settings.device,
        "dtype": settings.dtype,
        "kv_layout": settings.kv_layout,
        "replays": -(-settings.replays // max(settings.blocks, 1)),
        "python": settings.python,
        "threads": settings.threads,
    }
    return {name: value for name, value in options.items() if value is not None}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"
