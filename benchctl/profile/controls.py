"""The ladder of controls: the steps from the baseline to a variant, each as a variant of its own.

    baseline ▸ flags ▸ idle ▸ neutral ▸ the variant

flags    the baseline with the variant's server options, but for those that load a value model
idle     the variant's whole server; requests as the baseline's
neutral  the variant with guidance that is computed and changes nothing (value_scale 0)

Neighbours differ in one thing, so that their difference is its price. A step that changes nothing is left out, and
one that a swept factor does not reach runs once in a block.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from benchctl.profile.engine_options import options_class
from benchctl.profile.model import MAX_VARIANTS, Control, Profile, Variant, VariantSettings
from benchctl.profile.settings import cells_of, factors_of, resolve, setting_of
from benchctl.profile.yaml import Problem, merged
from benchctl.records.schema import Cell

_MEANING: Final = {
    "flags": "control: the baseline with the server options of {}, without its value model",
    "idle": "control: the server of {}, with the requests of the baseline",
    "neutral": "control: {} with guidance that is computed and changes nothing",
}


def with_controls(profile: Profile) -> tuple[Profile, list[Problem]]:
    """The profile with the steps of every variant that has ``controls``; a second time gives the same profile."""
    problems = list[Problem]()
    for name, variant in profile.variants.items():
        if not variant.controls:
            continue
        if name == profile.baseline:
            problem = "the baseline has no steps to itself; set controls on the variant that is studied"
            problems.append((("variants", name, "controls"), problem))
            continue
        steps = dict(_steps(profile, name))
        clashes = [step for step in steps if step in profile.variants and profile.variants[step].control is None]
        problem = f"controls of {name!r} would make a variant of this name; rename this one"
        problems += [(("variants", step), problem) for step in clashes]
        if not clashes:
            profile = _with_steps(profile, name, _different(profile, name, steps))
    if len(profile.variants) > MAX_VARIANTS:
        problems.append((("variants",), f"has more than {MAX_VARIANTS} entries"))
    return profile, problems


def _steps(profile: Profile, name: str) -> Iterator[tuple[str, Variant]]:
    """Every step to a variant, by its name; those that a stored profile has are as they are there."""
    below, own = profile.variants[profile.baseline], profile.variants[name]
    loading = options_class(profile.engine.kind).VALUE_MODEL_OPTIONS
    flags = merged(below.server, {key: value for key, value in own.server.items() if key not in loading})
    as_baseline = {"sampling": below.sampling, "request": below.request}
    parts: dict[str, dict[str, Any]] = {
        "flags": {"server": flags, "guidance": below.guidance, **as_baseline},
        "idle": {"server": own.server, **as_baseline},
    }
    if own.guidance is not None:
        neutral = own.guidance.model_copy(update={"value_scale": 0.0})
        parts["neutral"] = {key: getattr(own, key) for key in ("server", "sampling", "request")}
        parts["neutral"]["guidance"] = neutral
    for rung, sections in parts.items():
        factors = factors_of(own.swept, profile.sweep)
        reached = tuple(factor for factor in factors if _reaches(rung, setting_of(factor), loading))
        step = Variant(
            description=_MEANING[rung].format(name),
            swept=len(reached) == len(profile.sweep) or (reached or False),
            control=Control.model_validate({"of": name, "rung": rung}),
            **sections,
        )
        yield f"{name}-{rung}", profile.variants.get(f"{name}-{rung}", step)


def _reaches(rung: str, setting: tuple[str, ...], loading: frozenset[str]) -> bool:
    """True where a swept setting changes a step."""
    if rung == "neutral":
        return setting != ("guidance", "value_scale")
    if setting[0] not in {"model", "server"}:
        return False
    return rung == "idle" or setting[-1] not in loading


def _different(profile: Profile, name: str, steps: Mapping[str, Variant]) -> dict[str, Variant]:
    """The steps that differ from the one before them in some cell, and from the variant itself."""
    whole, before = _with_steps(profile, name, steps), profile.baseline
    cells = cells_of(factors_of(profile.variants[name].swept, profile.sweep))
    different = dict[str, Variant]()
    for step, variant in steps.items():
        own = [_settings(whole, step, cell) for cell in cells]
        if all(own != [_settings(whole, other, cell) for cell in cells] for other in (before, name)):
            different[step] = variant
            before = step
    return different


def _settings(profile: Profile, variant: str, cell: Cell) -> VariantSettings | None:
    """Settings of a variant in a cell, without its name; None where they are faulty."""
    own = factors_of(profile.variants[variant].swept, cell)
    settings, _ = resolve(profile, variant, {} if variant == profile.baseline else own)
    return None if settings is None else settings.model_copy(update={"variant": ""})


def _with_steps(profile: Profile, name: str, steps: Mapping[str, Variant]) -> Profile:
    """The profile with those of ``steps`` that it lacks right before the variant."""
    new = {step: variant for step, variant in steps.items() if step not in profile.variants}
    variants = dict[str, Variant]()
    for each, variant in profile.variants.items():
        variants |= {**(new if each == name else {}), each: variant}
    return profile.model_copy(update={"variants": variants})


def ladder_of(profile: Profile, name: str) -> tuple[str, ...]:
    """The baseline, the steps to a variant in their order, and the variant."""
    steps = (step for step, variant in profile.variants.items() if variant.control and variant.control.of == name)
    return (profile.baseline, *steps, name)
