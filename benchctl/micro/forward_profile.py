"""The profile of a micro-benchmark: phases, batch sizes and lengths in every mode, in blocks."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchctl.costs.shapes import shape_for
from benchctl.micro.point import DataType, KvLayout, Mode, Phase
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import Profile

DEFAULT_BLOCKS: Final = 8
DEFAULT_REPLAYS: Final = 200
PRIMARY_METRICS: Final = ("p50_step_ms",)
"""The median of a block's replays: a pass that the host interrupts moves a mean and not a median."""
_POINT_SETTINGS: Final = ("mode", "phase", "batch_size", "length", "new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """The passes to measure; every combination is a point, and every point runs in every mode."""

    model: str
    device: str
    dtype: DataType
    phases: Sequence[Phase]
    batch_sizes: Sequence[int]
    lengths: Sequence[int]
    modes: Sequence[Mode]
    """The first is the baseline."""
    kv_layout: KvLayout = "contiguous"
    hardware: str | None = None
    """Name of the device in the table of hardware, if it is there."""
    python: str | None = None
    blocks: int = DEFAULT_BLOCKS
    replays: int = DEFAULT_REPLAYS
    """Of each point and mode over all blocks; rounded up to as many in each."""
    seed: int = 0


def forward_profile(plan: ForwardPlan) -> Profile:
    """The profile of these points. Raises ProfileError for values that make no experiment."""
    variants = {mode: {"server": {"mode": mode}} for mode in plan.modes}
    sweep = {"phase": list(plan.phases), "batch_size": list(plan.batch_sizes), "length": list(plan.lengths)}
    name = f"micro-forward-{_slug(shape_for(plan.model).name)}"
    return micro_profile(name, plan, variants, sweep)


def micro_profile(
    name: str, plan: ForwardPlan, variants: Mapping[str, Mapping[str, Any]], sweep: Mapping[str, Sequence[Any]]
) -> Profile:
    """The profile of other variants and factors with the device, the numbers and the blocks of ``plan``.

    The first variant is the baseline, and swept like the others.
    """
    plain: dict[str, Any] = {
        "name": name,
        "description": f"forward passes of {plan.model} with random weights on {plan.device}",
        "seed": plan.seed,
        "blocks": plan.blocks,
        "model": plan.model,
        "engine": {"kind": "micro", "options": _engine_options(plan)},
        "workload": {"dataset": "none", "num_warmups": 0, "arrival": {"kind": "burst"}},
        "variants": {variant: dict(settings) for variant, settings in variants.items()},
        "baseline": next(iter(variants)),
        "sweep_baseline": True,
        "sweep": {factor: list(values) for factor, values in sweep.items()},
        "allowed_differences": [f"server.{setting}" for setting in _POINT_SETTINGS],
        "primary_metrics": list(PRIMARY_METRICS),
    }
    if plan.hardware is not None:
        plain["hardware"] = plan.hardware
    return profile_from_plain(plain, f"benchctl micro ({name})")


def _engine_options(plan: ForwardPlan) -> dict[str, Any]:
    options: dict[str, Any] = {
        "device": plan.device,
        "dtype": plan.dtype,
        "kv_layout": plan.kv_layout,
        "replays": -(-plan.replays // max(plan.blocks, 1)),
    }
    return options if plan.python is None else {**options, "python": plan.python}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"
