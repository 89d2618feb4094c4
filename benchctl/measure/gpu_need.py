"""The demand for a GPU: servers that do not start without one are refused before the first of them.

A module of its own, because a load on a running server needs no binding of NVML.
"""

import os
from collections.abc import Iterator
from math import prod
from typing import Any

import pynvml

from benchctl.measure.limits import Shortfall
from benchctl.measure.telemetry.gpus import absent_gpu
from benchctl.measure.telemetry.reading import VARIABLE
from benchctl.profile.engine_options import LaunchedOptions
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings


def gpu_shortfalls(profile: Profile, nvml: Any = pynvml) -> Iterator[Shortfall]:
    """One entry where an arm of ``profile`` needs a GPU and its server would see none."""
    servers = (variant_settings(profile, variant, cell).server for variant, cell in arms(profile))
    given: list[dict[str, str]] = [getattr(server, "env", {}) for server in servers if server.uses_gpu]
    for visible in dict.fromkeys(env.get(VARIABLE, os.environ.get(VARIABLE)) for env in given):
        if (absence := absent_gpu(visible, nvml)) is not None:
            reason, is_certain = absence
            kind = profile.engine.kind
            need = f"engine {kind!r} needs one in this profile; {_remedy(kind)}"
            message = f"no GPU is seen here ({reason}), and {need}"
            yield Shortfall(message=message, is_certain=is_certain)
            return


def _remedy(kind: str) -> str:
    preset = ENGINES[kind].preset_without_gpu
    instead = "" if preset is None else f"measure small models without one: --engine {preset}; or "
    return (
        f"{instead}make a GPU visible ('benchctl doctor --gpu' says what is missing), or, where the engine is "
        "built for another device, --set engine.options.needs_gpu=false"
    )


def gpus_of_block(profile: Profile, *, has_gpus: bool | None = None) -> int | None:
    """GPUs that one block takes: those its profile states, else as many as the largest server is spread over.

    The servers of a block run one after the other. Simulated and attached servers take none. An engine that can do
    with or without a GPU, and whose options do not say which, takes what there is: ``has_gpus`` tells of the host
    that measures; None where that is another one gives None.
    """
    if profile.cluster.gpus_per_block is not None:
        return profile.cluster.gpus_per_block
    servers = [variant_settings(profile, variant, cell).server for variant, cell in arms(profile)]
    launched = [server for server in servers if isinstance(server, LaunchedOptions)]
    if has_gpus is None and any(server.uses_gpu is None for server in launched):
        return None
    users = [server for server in launched if (has_gpus if server.uses_gpu is None else server.uses_gpu)]
    spread = ("tensor_parallel_size", "data_parallel_size")
    return max((prod(getattr(each, name, 1) for name in spread) for each in users), default=0)
