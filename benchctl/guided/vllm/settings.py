"""Settings of guidance in a vLLM server: variables of its environment, which all its processes see."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from benchctl.guided.params import GuidanceError

MODEL_VARIABLE: Final = "BENCHCTL_LENVM_MODEL"
"""Directory of the value model; unset, nothing is guided and requests that ask for guidance are refused."""
SETTINGS_VARIABLE: Final = "BENCHCTL_LENVM_SETTINGS"
"""JSON object with fields of ``VllmSettings``."""
STEP_LOG_VARIABLE: Final = "BENCHCTL_LENVM_STEP_LOG"
"""File to which each guided step is appended as one line; unset, none is written."""
CLOCK_VARIABLE: Final = "BENCHCTL_LENVM_CLOCK"
"""``host`` or ``device``: whose times the sections of that file are; unset, the host's."""
DESCRIPTION_VARIABLE: Final = "BENCHCTL_LENVM_DESCRIPTION"
"""File in which the loaded value model is described as one JSON object."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the whole server; those of one request are in its ``vllm_xargs``."""

    fused: bool = True
    """Extend prefixes and score candidates in one forward pass of the value model; if false, in two."""
    graphs: bool = True
    """Capture forward passes as CUDA graphs; without CUDA there are none."""
    lazy: bool = False
    """Load the value model in the first step that needs it, rather than at the start."""
    reuse: bool = True
    """Keep the keys and values of the candidate that is drawn, instead of computing the token again."""
    record: int = 0
    """Number of candidates for which the passes of all sizes are recorded before the first request; 0: none are."""
    kernels: bool = True
    """Compute what lies between matrix products by kernels of our own, on a GPU; without, by torch."""
    skips_early: bool | None = None
    """See ``guide.GuideSettings``."""
    dtype: str = "auto"
    """Of the value model: ``auto`` as it is stored, or ``bfloat16``, ``float16``, ``float32``."""
    random_weights: bool = False
    """Draw weights on the device instead of reading them, to price a size without its checkpoint."""
    max_candidates: int = 64
    """Requests with a larger top_k are refused."""
    memory_bytes: int | None = None
    """Most memory that the prefixes of all requests may take; None: whatever they need."""


def model_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The value model that this server is to load."""
    named = environment.get(MODEL_VARIABLE)
    return Path(named) if named else None


def settings_of(environment: Mapping[str, str] = os.environ) -> VllmSettings:
    """The settings in the environment. Raises GuidanceError for an unknown or invalid one."""
    text = environment.get(SETTINGS_VARIABLE, "{}")
    try:
        return msgspec.json.decode(text, type=VllmSettings)
    except msgspec.DecodeError as error:
        keys = ", ".join(VllmSettings.__struct_fields__)
        raise GuidanceError(
            f"{SETTINGS_VARIABLE} is {text!r} ({error}); write an object with keys of {keys}"
        ) from None
