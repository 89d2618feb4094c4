"""Checks of memory: what the value models of a profile take, and the KV cache that is left for all arms."""

from collections.abc import Iterator
from functools import partial

from benchctl.errors import UsageError
from benchctl.measure.doctor.check import Check
from benchctl.measure.kv_memory import KvPlan, plan_kv_memory, value_models
from benchctl.profile.model import Profile

_check = partial(Check, topic="memory", is_needed=True)


def memory_checks(profile: Profile) -> tuple[Check, ...]:
    """One check for each value model of the profile, and one for the KV cache beside the largest."""
    plan = plan_kv_memory(profile)
    return (*_value_model_checks(profile), *_kv_checks(plan))


def _value_model_checks(profile: Profile) -> Iterator[Check]:
    try:
        for directory, memory in value_models(profile).items():
            yield _check(
                name="value model",
                finding=f"{memory} ({directory})",
                facts={"directory": directory, "weight_bytes": memory.weights, "prefix_bytes": memory.prefixes},
            )
    except UsageError as error:
        remedy = "name the directory of a value model with --set variants.NAME.server.value_model=DIR"
        yield _check(name="value model", finding=str(error), remedy=remedy, is_missing=True)


def _kv_checks(plan: KvPlan) -> Iterator[Check]:
    if plan.refusal is not None:
        remedy = "change one of these with --set, or in the profile"
        yield _check(name="KV cache", finding=plan.refusal, remedy=remedy, is_missing=True)
    elif plan.memory is not None:
        facts = {"kv_cache_bytes": plan.memory.num_bytes, "device_bytes": plan.memory.device_bytes}
        yield _check(name="KV cache", finding=str(plan.text), facts=facts)
    elif plan.text is not None:
        yield _check(name="KV cache", finding=plan.text)
