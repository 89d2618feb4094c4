"""The points of a micro-benchmark, and the profile of the experiment that measures them."""

import re
from collections.abc import Sequence
from itertools import product
from typing import Any, Final

from benchctl.costs.shapes import shape_for
from benchctl.profile.choices import ForwardPoint, Mode, Phase
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import Profile
from benchctl.records.schema import Cell

PRIMARY_METRICS: Final = ("p50_step_ms",)
"""The median of a block's replays: a pass that the host interrupts moves a mean and not a median."""
_POINT_SETTINGS: Final = ("mode", "phase", "batch_size", "length", "new_tokens")


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


def forward_profile(
    points: Sequence[ForwardPoint],
    *,
    model: str,
    modes: Sequence[Mode],
    hardware: str | None = None,
    blocks: int = 8,
    replays: int = 200,
    seed: int = 0,
    name: str = "forward",
    **engine_options: Any,
) -> Profile:
    """The experiment ``micro-<name>-<model>`` of these points in all modes.

    Every mode is a variant, the first of them the baseline, and every point a cell; each cell of a variant is
    compared with the same cell of the baseline. ``replays`` are those of each point and mode over all blocks,
    rounded up to as many in each; ``hardware`` names the device in the table of hardware, if it is there.
    ``engine_options`` are options of the engine ``micro``, None for its default. Raises ProfileError for values
    that make no experiment.
    """
    cells = cells_of_points(points)
    sweep = {factor: list(dict.fromkeys(cell[factor] for cell in cells)) for factor in cells[0]}
    name = f"micro-{name}-{_slug(shape_for(model).name)}"
    options = {"replays": -(-replays // max(blocks, 1)), **engine_options}
    plain: dict[str, Any] = {
        "name": name,
        "description": f"forward passes of {model} with random weights on {options['device']}",
        "seed": seed,
        "blocks": blocks,
        "model": model,
        "engine": {"kind": "micro", "options": {key: value for key, value in options.items() if value is not None}},
        "workload": {"dataset": "none", "num_warmups": 0, "arrival": {"kind": "burst"}},
        "variants": {mode: {"server": {"mode": mode}} for mode in modes},
        "baseline": modes[0],
        "sweep": sweep,
        "cells": [dict(cell) for cell in cells],
        "sweep_baseline": True,
        "allowed_differences": [f"server.{setting}" for setting in _POINT_SETTINGS],
        "primary_metrics": list(PRIMARY_METRICS),
    }
    if hardware is not None:
        plain["hardware"] = hardware
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


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"
