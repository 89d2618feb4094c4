"""The profile of a LenVM timing directory, from the settings that its files record."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchctl.costs.shapes import shape_for
from benchctl.errors import InvalidDataError, ProfileError, UsageError
from benchctl.interop.lenvm.arm import ArmData, whole_number
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import Profile

DEFAULT_MODEL: Final = "Qwen/Qwen2.5-7B-Instruct"
DEFAULT_VALUE_MODEL: Final = "namezz/lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct"
"""Models of the published experiment, the defaults of its scripts."""
_SEPARATOR: Final = "_vs_"
_RESULTS_SUFFIX: Final = re.compile(r"_k\d+$")
_DATASETS: Final = frozenset({"gsm8k"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Base and value model, which no file of such a directory names."""

    base: str
    value: str
    is_assumed: bool


def models_of(directory: Path, base: str | None, value: str | None) -> Models:
    """The models by argument, else by the directory's name (``BASE_vs_VALUE``), else the published pair.

    Raises UsageError for a name that is neither a known shape nor a directory with one.
    """
    name = _RESULTS_SUFFIX.sub("", directory.resolve().name)
    named_base, separator, named_value = name.partition(_SEPARATOR)
    for text in (base, value):
        if text is not None:
            shape_for(text)
    return Models(
        base=base or (named_base if separator and _is_known(named_base) else DEFAULT_MODEL),
        value=value or (named_value if separator and _is_known(named_value) else DEFAULT_VALUE_MODEL),
        is_assumed=not (separator and _is_known(named_base) and _is_known(named_value)) and (not base or not value),
    )


def _is_known(model: str) -> bool:
    try:
        shape_for(model)
    except UsageError:
        return False
    return True


def profile_of_arms(name: str, arms: Sequence[ArmData], models: Models, revision: str | None) -> Profile:
    """The profile. Raises InvalidDataError if no server could have been asked for the recorded settings."""
    base = arms[0]
    meta, dataset = base.meta, base.meta.dataset
    num_questions = max((len(arm.responses.answered) for arm in arms), default=0) or meta.max_questions or 1
    plain: dict[str, Any] = {
        "name": name,
        "description": f"imported from {name}",
        "blocks": 1,
        "stop": "natural",
        "engine": {"kind": "sglang-lenvm", "options": {"revision": revision}},
        "model": models.base,
        "workload": {
            "dataset": dataset if dataset in _DATASETS else "generated",
            "num_prompts": num_questions,
            "samples_per_prompt": whole_number(base.body.get("n")) or meta.n_samples_per_q or 1,
            "max_tokens": whole_number(base.body.get("max_tokens")) or meta.max_tokens or 1,
            "arrival": {"kind": "closed-loop", "max_concurrency": base.concurrency},
            "num_warmups": 0,
            "allow_prefix_cache_hits": True,
        },
        "variants": {variant_name(arm.tag): _variant(arm, models) for arm in arms},
        "allowed_differences": ["sampling.top_k", "server.value_model", "server.overlap_schedule", "guidance.*"],
        "primary_metrics": ["wall_s", "output_throughput", "e2el_ms"],
    }
    try:
        return profile_from_plain(plain, name)
    except ProfileError as error:
        raise InvalidDataError(
            f"{name}: the recorded settings are impossible, or unknown to benchctl:\n{error}"
        ) from error


def variant_name(tag: str) -> str:
    """A tag as the name of a variant."""
    return re.sub(r"[^a-z0-9._-]+", "-", tag.lower()).strip("-._") or "untagged"


def _variant(arm: ArmData, models: Models) -> dict[str, Any]:
    variant: dict[str, Any] = {"sampling": arm.sampling}
    if arm.guidance is not None:
        variant["server"] = {"value_model": models.value, "overlap_schedule": False}
        variant["guidance"] = arm.guidance
    return variant
