"""One size of KV cache for all arms of an experiment with a value model, computed where its GPU is."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from benchctl.engines.engine import engine_for, own_options
from benchctl.engines.vllm_lenvm.engine import disallowed, value_model_of
from benchctl.engines.vllm_lenvm.kv_memory import (
    KvMemory,
    default_max_num_seqs,
    equal_kv_memory,
    max_model_len_of,
    states_kv_size,
)
from benchctl.engines.vllm_lenvm.options import VllmLenvmOptions
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.guided.value_model.sizes import ValueModelMemory
from benchctl.measure.kv_option import KV_OPTION, with_kv_bytes
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.measure.telemetry.reading import VARIABLE
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import arm_label
from benchctl.records.schema import GpuInfo, ResultWarning
from benchctl.units import GIB

_KIND: Final = "vllm-lenvm"

_LEFT: Final = "left to vLLM, so that arms may differ in it"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The KV cache of an experiment's servers; empty where none loads a value model, or the profile states it."""

    memory: KvMemory | None = None
    """The size that all arms get, and what it was computed from."""
    reason: str | None = None
    """Why none was computed, although an arm loads a value model."""
    refusal: str | None = None
    """Why the servers cannot be started; with the remedy."""

    @property
    def text(self) -> str | None:
        """The plan in one sentence."""
        if self.memory is not None and self.refusal is None:
            return f"KV cache of every arm: {self.memory.num_bytes / GIB:.2f} GiB, which is {self.memory}"
        return None if self.reason is None else f"KV cache of every arm: {self.reason}"

    @property
    def notes(self) -> tuple[ResultWarning, ...]:
        """The note for the result directory."""
        if self.memory is None or self.text is None:
            return ()
        return (ResultWarning(code="kv-memory-computed", message=self.text),)

    def applied_to(self, profile: Profile) -> Profile:
        """The profile whose engine has this size."""
        if self.memory is None or self.refusal is not None:
            return profile
        return with_kv_bytes(profile, self.memory.num_bytes)


def plan_kv_memory(profile: Profile) -> KvPlan:
    """The size of the KV cache for all arms of ``profile``, on the GPU of this machine."""
    settings = _settings(profile)
    guided = _guided(settings)
    if not guided:
        return KvPlan()
    gpus = _devices(settings)
    if (refusal := _disallowed(guided, gpus)) is not None:
        return KvPlan(refusal=refusal)
    if states_kv_size(settings.values()):
        return KvPlan()
    if (reason := _no_gpu(gpus, guided[0])) is not None:
        return KvPlan(reason=reason)
    try:
        memory = equal_kv_memory(_smallest(gpus), settings)
    except UsageError as error:
        return KvPlan(reason=f"{_LEFT}; it cannot be computed: {error}")
    return KvPlan(memory=memory, refusal=None if memory.fits else _refusal(memory))


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


def _settings(profile: Profile) -> dict[str, VariantSettings]:
    """The settings of each arm by its label; none of an engine that loads no value model of this kind."""
    if profile.engine.kind != _KIND:
        return {}
    return {arm_label(*arm): variant_settings(profile, *arm) for arm in arms(profile)}


def _guided(settings: Mapping[str, VariantSettings]) -> tuple[VariantSettings, ...]:
    return tuple(each for each in settings.values() if each.server.guides_with is not None)


def _disallowed(guided: Iterable[VariantSettings], gpus: tuple[GpuInfo, ...]) -> str | None:
    """The first reason why ``value_memory_bytes`` refuses a value model whose memory is known."""
    for settings in guided:
        with suppress(UsageError):
            if (refusal := disallowed(settings, value_model_on(settings, gpus))) is not None:
                return refusal
    return None


def value_model_on(settings: VariantSettings, gpus: tuple[GpuInfo, ...]) -> ValueModelMemory:
    """The memory of an arm's value model on a machine with these devices. Raises UsageError where it is unknown."""
    max_num_seqs = own_options(settings, VllmLenvmOptions).max_num_seqs
    if max_num_seqs is None:
        if not gpus:
            raise UsageError("vLLM chooses max_num_seqs by the GPU, and none is seen here; set it")
        max_num_seqs = default_max_num_seqs(_smallest(gpus))
    return value_model_of(settings, max_num_seqs, max_model_len_of(settings))


def _devices(settings: Mapping[str, VariantSettings]) -> tuple[GpuInfo, ...]:
    """The GPUs that servers of these settings may use."""
    named = {own_options(each, VllmLenvmOptions).env.get(VARIABLE) for each in settings.values()}
    return tuple(gpu for visible in sorted(named, key=str) for gpu in gpu_inventory(visible))


def _smallest(gpus: tuple[GpuInfo, ...]) -> GpuInfo:
    return min(gpus, key=lambda gpu: gpu.memory_bytes or 0)


def _no_gpu(gpus: tuple[GpuInfo, ...], settings: VariantSettings) -> str | None:
    """The reason why servers have no GPU whose memory is known; None where they have one."""
    if not gpus:
        return "not computed, because no GPU is seen here; it is computed on the machine with the GPU"
    if _smallest(gpus).memory_bytes is None:
        return f"{_LEFT}; the driver does not tell the memory of the GPU"
    try:
        installation = engine_for(_KIND).installation(settings.server)
    except EngineUnavailableError:
        return None
    if installation is not None and (installation.torch or "").endswith("+cpu"):
        return "not computed, because the vLLM that is installed here computes on the CPU"
    return None


def _refusal(memory: KvMemory) -> str:
    left = f"{memory.num_bytes / GIB:.2f} GiB are left" if memory.num_bytes > 0 else "nothing is left"
    return (
        f"no KV cache fits beside the value model: of {memory}, {left}, and the longest sequence takes "
        f"{memory.sequence / GIB:.2f} GiB; lower max_num_seqs or max_model_len, choose a smaller value model, or "
        f"state {KV_OPTION} yourself"
    )
