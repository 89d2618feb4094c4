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

from benchctl.profile.checks import MAX_CELLS, baseline_name, number_of_cells, swept_factors
from benchctl.profile.engine_options import ENGINES, options_class
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.settings import cells_of, factors_of, resolve, setting_of
from benchctl.profile.yaml import LocatedDict, LocatedError, located, merge
from benchctl.records.schema import Cell

_NEUTRAL_SETTING: Final = "guidance.value_scale"
_MEANING: Final = {
    "flags": "control: the baseline with the server options of {}, without its value model",
    "idle": "control: the server of {}, with the requests of the baseline",
    "neutral": "control: {} with guidance that is computed and changes nothing",
}


def with_controls(profile: LocatedDict, errors: list[LocatedError]) -> LocatedDict:
    """The profile with the steps of every variant that has ``controls``; a second time gives the same profile."""
    variants, baseline = profile.mapping("variants"), baseline_name(profile)
    kind = profile.mapping("engine").get("kind")
    if baseline not in variants or not isinstance(kind, str) or kind not in ENGINES:
        return profile
    for name, variant in variants.items():
        if not isinstance(variant, LocatedDict) or variant.get("controls") is not True:
            continue
        if name == baseline:
            problem = "the baseline has no steps to itself; set controls on the variant that is studied"
            errors.append(variant.error(problem, "controls"))
            continue
        profile = _Ladder(profile, baseline, name, kind).build(errors)
    return profile


class _Ladder:
    """The steps to one variant."""

    def __init__(self, profile: LocatedDict, baseline: str, name: str, kind: str) -> None:
        self._profile, self._baseline, self._name, self._kind = profile, baseline, name, kind
        self._variants = profile.mapping("variants")
        self._below, self._own = profile.mapping("variants", baseline), profile.mapping("variants", name)
        self._loading = options_class(kind).VALUE_MODEL_OPTIONS
        sweep = profile.mapping("sweep")
        is_sound = all(isinstance(values, list) for values in sweep.values())
        self._sweep: dict[str, Any] = dict(sweep) if is_sound else {}
        self._factors = factors_of(swept_factors(self._own), self._sweep)
        if number_of_cells(profile, self._factors) > MAX_CELLS:  # an error of its own, in the checks
            self._factors = {}

    def build(self, errors: list[LocatedError]) -> LocatedDict:
        """The profile with those steps that differ from their neighbours, each before the variant."""
        steps = {f"{self._name}-{rung}": self._step(rung, parts) for rung, parts in self._parts()}
        clashes = [s for s in steps if s in self._variants and "control" not in self._variants.mapping(s)]
        if clashes:
            problem = f"controls of {self._name!r} would make a variant of this name; rename this one"
            errors += (self._variants.error(problem, step) for step in clashes)
            return self._profile
        steps = {step: self._variants.get(step, variant) for step, variant in steps.items()}
        different = self._different(steps)
        return self._with_variants({s: v for s, v in different.items() if s not in self._variants})

    def _parts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The sections that each step has from the baseline and from the variant."""
        server, guidance = self._own.mapping("server"), self._own.get("guidance")
        flags = merge(self._below.get("server"), server.without(*self._loading))
        of_baseline = {key: self._below.get(key) for key in ("sampling", "request", "guidance")}
        yield "flags", {"server": flags, **of_baseline}
        yield "idle", {"server": server, "sampling": of_baseline["sampling"], "request": of_baseline["request"]}
        if isinstance(guidance, LocatedDict):
            tilt_free = guidance.with_value("value_scale", 0.0)
            requests = {key: self._own.get(key) for key in ("sampling", "request")}
            yield "neutral", {"server": server, **requests, "guidance": tilt_free}

    def _step(self, rung: str, parts: Mapping[str, Any]) -> LocatedDict:
        reached = [factor for factor in self._factors if self._reaches(rung, setting_of(factor))]
        keys = {
            "description": _MEANING[rung].format(self._name),
            "swept": len(reached) == len(self._sweep) or (reached or False),
            "control": {"of": self._name, "rung": rung},
        }
        step: LocatedDict = located(keys, self._own.location)
        for key, value in parts.items():
            if value is not None:
                step = step.with_value(key, value, value.location if isinstance(value, LocatedDict) else None)
        return step

    def _reaches(self, rung: str, setting: tuple[str, ...]) -> bool:
        """True where a swept setting changes a step."""
        if rung == "neutral":
            return ".".join(setting) != _NEUTRAL_SETTING
        if setting[0] not in {"model", "server"}:
            return False
        return rung == "idle" or setting[-1] not in self._loading

    def _different(self, steps: Mapping[str, LocatedDict]) -> dict[str, LocatedDict]:
        """The steps that differ from the one before them in some cell, and from the variant itself."""
        profile, different, before = self._with_variants(steps), dict[str, LocatedDict](), self._baseline
        for name, step in steps.items():
            if not self._is_same(profile, before, name) and not self._is_same(profile, name, self._name):
                different[name] = step
                before = name
        return different

    def _is_same(self, profile: LocatedDict, left: str, right: str) -> bool:
        return all(
            (settings := self._settings(profile, left, cell)) is not None
            and settings == self._settings(profile, right, cell)
            for cell in cells_of(self._factors)
        )

    def _settings(self, profile: LocatedDict, variant: str, cell: Cell) -> VariantSettings | None:
        """Settings of a variant in a cell, without its name; None where they are faulty."""
        own = factors_of(swept_factors(profile.mapping("variants")[variant]), cell)
        settings, _ = resolve(profile, self._kind, variant, {} if variant == self._baseline else own)
        return None if settings is None else settings.model_copy(update={"variant": ""})

    def _with_variants(self, steps: Mapping[str, LocatedDict]) -> LocatedDict:
        """The profile with ``steps`` right before the variant."""
        entries = dict[str, Any]()
        for name, variant in self._variants.items():
            if name == self._name:
                entries |= steps
            if name not in steps:
                entries[name] = variant
        locations = self._variants.locations | {name: step.location for name, step in steps.items()}
        return self._profile.with_value("variants", LocatedDict(entries, self._variants.location, locations))


def ladder_of(profile: Profile, name: str) -> tuple[str, ...]:
    """The baseline, the steps to a variant in their order, and the variant."""
    steps = (step for step, variant in profile.variants.items() if variant.control and variant.control.of == name)
    return (profile.baseline, *steps, name)
