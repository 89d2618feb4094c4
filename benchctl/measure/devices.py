"""Devices that a planned experiment needs: a GPU that its servers see, and one size of KV cache for all arms."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml

from benchctl.engines.engine import own_options
from benchctl.engines.vllm_lenvm.engine import disallowed, value_model_of
from benchctl.engines.vllm_lenvm.kv_memory import (
    default_max_num_seqs,
    equal_kv_memory,
    max_model_len_of,
    states_kv_size,
)
from benchctl.engines.vllm_lenvm.options import VllmLenvmOptions
from benchctl.errors import UsageError
from benchctl.guided.value_model.sizes import ValueModelMemory
from benchctl.measure.machine import Shortfall
from benchctl.measure.telemetry.gpus import gpu_inventory, has_device_files, opened
from benchctl.measure.telemetry.reading import VARIABLE, hides_all
from benchctl.profile.choices import LaunchedOptions
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import arm_label
from benchctl.records.schema import GpuInfo
from benchctl.untrusted.text import visible_value


def absent_gpu(visible: str | None, nvml: Any = pynvml, system: Path = Path("/dev")) -> tuple[str, bool] | None:
    """The reason why no device that ``visible`` names is there, and whether that is certain; None where one is.

    It is not where the system has files of devices, in the directory ``system``, that neither way can read.
    """
    with opened(visible, nvml) as gpus:
        if gpus.reader is not None:
            return None
    names = "" if visible is None else f"{VARIABLE} is {visible_value(visible)}; "
    return f"{names}{gpus.problem}", gpus.has_driver or hides_all(visible) or not has_device_files(system)


def gpu_shortfalls(profile: Profile, nvml: Any = pynvml) -> Iterator[Shortfall]:
    """One entry where an arm of ``profile`` needs a GPU and its server would see none."""
    servers = (variant_settings(profile, variant, cell).server for variant, cell in arms(profile))
    environments: list[dict[str, str]] = [getattr(server, "env", {}) for server in servers if server.uses_gpu]
    for visible in dict.fromkeys(env.get(VARIABLE, os.environ.get(VARIABLE)) for env in environments):
        if (absence := absent_gpu(visible, nvml)) is not None:
            reason, is_certain = absence
            preset = ENGINES[profile.engine.kind].preset_without_gpu
            instead = "" if preset is None else f"measure small models without one: --engine {preset}; or "
            message = (
                f"no GPU is seen here ({reason}), and engine {profile.engine.kind!r} needs one in this profile; "
                f"{instead}make a GPU visible ('benchctl doctor --gpu' says what is missing), or, where the engine "
                "is built for another device, --set engine.options.needs_gpu=false"
            )
            yield Shortfall(message=message, is_certain=is_certain)
            return


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
    return max(
        (
            math.prod(getattr(each, name, 1) for name in ("tensor_parallel_size", "data_parallel_size"))
            for each in users
        ),
        default=0,
    )


def kv_shortfalls(profile: Profile) -> Iterator[Shortfall]:
    """One entry where servers with value models may not have the memory that they are planned with, or where the
    arms may get KV caches of different sizes; none where the profile states a size, or no arm loads a value model.
    """
    settings = _settings(profile)
    guided, gpus = _guided(settings), _devices(settings)
    for each in guided:
        with suppress(UsageError):  # a value model of unknown memory
            if (refusal := disallowed(each, value_model_on(each, gpus))) is not None:
                yield Shortfall(message=refusal)
                return
    if not guided or states_kv_size(settings.values()):
        return
    try:
        yield Shortfall(message=equal_kv_memory(_smallest(gpus), settings))
    except UsageError as error:
        yield Shortfall(
            message=f"the KV caches of the arms may differ in size, and what fits in all is not known: {error}",
            is_certain=False,
        )


def value_models(profile: Profile) -> dict[str, ValueModelMemory]:
    """The memory of each value model that a profile's servers load, by directory; of several servers the most.

    Raises UsageError where it cannot be known here.
    """
    settings = _settings(profile)
    gpus, models = _devices(settings), dict[str, ValueModelMemory]()
    for each in _guided(settings):
        memory, directory = value_model_on(each, gpus), str(each.server.guides_with)
        if directory not in models or memory.prefixes > models[directory].prefixes:
            models[directory] = memory
    return models


def value_model_on(settings: VariantSettings, gpus: tuple[GpuInfo, ...]) -> ValueModelMemory:
    """The memory of an arm's value model on a machine with these devices. Raises UsageError where it is unknown."""
    max_num_seqs = own_options(settings, VllmLenvmOptions).max_num_seqs
    if max_num_seqs is None:
        max_num_seqs = default_max_num_seqs(_smallest(gpus))
    return value_model_of(settings, max_num_seqs, max_model_len_of(settings))


def _settings(profile: Profile) -> dict[str, VariantSettings]:
    """The settings of each arm by its label; none of an engine that loads no value model of this kind."""
    if profile.engine.kind != "vllm-lenvm":
        return {}
    return {arm_label(*arm): variant_settings(profile, *arm) for arm in arms(profile)}


def _guided(settings: dict[str, VariantSettings]) -> tuple[VariantSettings, ...]:
    return tuple(each for each in settings.values() if each.server.guides_with is not None)


def _devices(settings: dict[str, VariantSettings]) -> tuple[GpuInfo, ...]:
    """The GPUs that servers of these settings may use."""
    named = {own_options(each, VllmLenvmOptions).env.get(VARIABLE) for each in settings.values()}
    return tuple(gpu for visible in sorted(named, key=str) for gpu in gpu_inventory(visible))


def _smallest(gpus: tuple[GpuInfo, ...]) -> GpuInfo:
    """The GPU with the least memory. Raises UsageError where none is seen."""
    if not gpus:
        raise UsageError("it depends on the GPU, and none is seen here; ask on the machine that has it")
    return min(gpus, key=lambda gpu: gpu.memory_bytes or 0)
