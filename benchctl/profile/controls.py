"""The ladder of controls: the steps from the baseline to a variant, each as a variant of its own.

    baseline ▸ flags ▸ idle ▸ neutral ▸ the variant

flags    the baseline with the variant's server options, but for those that load a value model
idle     the variant's whole server; requests as the baseline's
neutral  the variant with guidance that is computed and changes nothing (value_scale 0)

Neighbours differ in one thing, so that their difference is its price. A step that changes nothing is left out, and
one that a swept factor does not reach runs once in a block.
"""

from typing import Any, Final

from benchctl.profile.engine_table import options_class
from benchctl.profile.model import MAX_VARIANTS, Control, Profile, Variant, VariantSettings
from benchctl.profile.settings import cells_of, factors_of, resolved_settings, server_part, setting_of
from benchctl.profile.yaml import Problem, merged

_MEANING: Final = {
    "flags": "control: the baseline with the server options of {}, without its value model",
    "idle": "control: the server of {}, with the requests of the baseline",
    "neutral": "control: {} with guidance that is computed and changes nothing",
}


def with_controls(profile: Profile) -> tuple[Profile, list[Problem]]:
    """The profile with the steps of every variant that has ``controls``; a second time gives the same profile."""
    problems, variants = list[Problem](), dict[str, Variant]()
    for name, variant in profile.variants.items():
        if variant.controls and name == profile.baseline:
            problem = "the baseline has no steps to itself; set controls on the variant that is studied"
            problems.append((("variants", name, "controls"), problem))
        elif variant.controls:
            steps = _steps(profile, name)
            clashes = [step for step, own in steps.items() if own.control is None]
            problem = f"controls of {name!r} would make a variant of this name; rename this one"
            problems += [(("variants", step), problem) for step in clashes]
            # Those that a stored profile has stay where they are.
            variants |= {step: own for step, own in steps.items() if step not in profile.variants}
        variants[name] = variant
    if len(variants) > MAX_VARIANTS:
        problems.append((("variants",), f"has more than {MAX_VARIANTS} entries"))
    return profile.model_copy(update={"variants": variants}), problems


def _steps(profile: Profile, name: str) -> dict[str, Variant]:
    """The steps to a variant that differ in some cell from the one before them, and from the variant itself.

    A variant of the profile that has the name of a step is as it is there.
    """
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
        parts["neutral"] = {
            "server": own.server,
            "sampling": own.sampling,
            "request": own.request,
            "guidance": neutral,
        }
    # Load factors reach every variant, and no setting of one
    factors, cells = tuple(server_part(dict.fromkeys(factors_of(profile, name)))), cells_of(profile, name)
    swept = server_part(dict.fromkeys(profile.sweep))

    def settings_of(variant: Variant, reached: tuple[str, ...]) -> list[VariantSettings | None]:
        unnamed = profile.model_copy(update={"variants": {"": variant}})
        own_cells = ({factor: value for factor, value in cell.items() if factor in reached} for cell in cells)
        return [resolved_settings(unnamed, "", cell)[0] for cell in own_cells]

    steps, before, whole = dict[str, Variant](), settings_of(below, ()), settings_of(own, factors)
    for rung, sections in parts.items():
        reached = tuple(factor for factor in factors if _reaches(rung, setting_of(factor), loading))
        step = Variant(
            description=_MEANING[rung].format(name),
            swept=len(reached) == len(swept) or (reached or False),
            control=Control.model_validate({"of": name, "rung": rung}),
            **sections,
        )
        step = profile.variants.get(f"{name}-{rung}", step)
        settings = settings_of(step, reached)
        if step.control is None or settings not in (before, whole):
            steps[f"{name}-{rung}"], before = step, settings
    return steps


def _reaches(rung: str, setting: tuple[str, ...], loading: frozenset[str]) -> bool:
    """True where a swept setting changes a step."""
    if rung == "neutral":
        return setting != ("guidance", "value_scale")
    return setting[0] in {"model", "server"} and (rung == "idle" or setting[-1] not in loading)


def ladder_of(profile: Profile, name: str) -> tuple[str, ...]:
    """The baseline, the steps to a variant in their order, and the variant."""
    steps = (step for step, variant in profile.variants.items() if variant.control and variant.control.of == name)
    return (profile.baseline, *steps, name)
