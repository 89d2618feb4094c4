"""One size of KV cache for all arms of an experiment with a value model: where none is stated, the one to state."""

from collections.abc import Iterator
from contextlib import suppress

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
from benchctl.measure.limits import Shortfall
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.measure.telemetry.reading import VARIABLE
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import arm_label
from benchctl.records.schema import GpuInfo


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
        message = f"the KV caches of the arms may differ in size, and what fits in all is not known: {error}"
        yield Shortfall(message=message, is_certain=False)


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
