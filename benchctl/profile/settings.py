"""The settings of one run: the profile's, the variant's over them, the cell's over both.

model     profile.model
server    engine.options    <  variant.server
sampling  profile.sampling  <  variant.sampling
request   profile.request   <  variant.request    null removes an inherited field
guidance  variant.guidance
and at last each factor of the cell, at the setting it stands for
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from operator import methodcaller
from typing import Final, TypeAlias, TypeVar

from pydantic import ValidationError, create_model

from benchctl.guided.parameter_table import EXPONENTIAL_MODES
from benchctl.profile.engine_options import guiding_kinds, options_class
from benchctl.profile.errors import validate
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Guidance, Profile, Sampling, VariantSettings
from benchctl.profile.request import RequestOptions
from benchctl.profile.request_checks import FREE_SECTIONS, merge_fields, request_errors
from benchctl.profile.yaml import LocatedDict, LocatedError, LocatedList, Location, changed_at, merge
from benchctl.records.schema import Cell

V = TypeVar("V")
Values: TypeAlias = Sequence[str | int | float | bool | None]
"""Values of one factor of a sweep."""

FACTOR_SETTINGS: Final = {
    "model": "model",
    "top_k": "sampling.top_k",
    "value_model": "server.value_model",
    "value_scale": "guidance.value_scale",
    "max_num_seqs": "server.max_num_seqs",
    "num_speculative_tokens": "server.num_speculative_tokens",
    "bonus_token": "server.bonus_token",
    "draft_model": "server.draft_model",
    "speculative_method": "server.speculative_method",
    "phase": "server.phase",
    "batch_size": "server.batch_size",
    "length": "server.length",
    "new_tokens": "server.new_tokens",
}
"""Factors with a short name, and the setting that each stands for. Any other factor is itself a dotted path."""

_DEFAULT_MODEL: Final = Profile.model_fields["model"].default


def setting_of(factor: str) -> tuple[str, ...]:
    """The path of the setting that a factor stands for."""
    return tuple(FACTOR_SETTINGS.get(factor, factor).split("."))


def cells_of(sweep: Mapping[str, Values]) -> tuple[Cell, ...]:
    """Every combination of the factors' values, the last factor changing fastest; one empty cell without any."""
    return tuple(dict(zip(sweep, values, strict=True)) for values in product(*sweep.values()))


def swept_cells(
    swept: bool | Sequence[str], sweep: Mapping[str, Values], cells: Sequence[Cell] = ()
) -> tuple[Cell, ...]:
    """The cells of a variant whose ``swept`` says this: every combination, or those of ``cells`` alone."""
    factors = factors_of(swept, sweep)
    if not cells or not factors:
        return cells_of(factors)
    distinct: list[Cell] = []
    for cell in cells:
        of_variant = {factor: cell[factor] for factor in factors}
        if of_variant not in distinct:
            distinct.append(of_variant)
    return tuple(distinct)


def factors_of(swept: bool | Sequence[str], sweep: Mapping[str, V]) -> dict[str, V]:
    """The factors of a sweep that apply to a variant whose ``swept`` says this."""
    if isinstance(swept, bool):
        return dict(sweep) if swept else {}
    return {factor: values for factor, values in sweep.items() if factor in swept}


def factor_problem(factor: str, kind: str) -> str | None:
    """The reason why ``factor`` cannot be swept with an engine of this kind; None when it can."""
    settings, path = _settings_of_kind(kind), setting_of(factor)
    if ".".join(path) in settings or _is_in_free_section(path):
        return None
    hint = did_you_mean(factor, (*FACTOR_SETTINGS, *settings))
    hint = hint or "name one such as server.max_num_seqs or sampling.min_p"
    return f"no factor or setting has this name; factors are {', '.join(FACTOR_SETTINGS)}, or a dotted path; {hint}"


def resolve(
    profile: LocatedDict, kind: str, variant: str, cell: Cell
) -> tuple[VariantSettings | None, tuple[LocatedError, ...]]:
    """The settings of one run on an engine of this kind, or None and the errors at their locations.

    ``profile`` needs its model, engine, sampling and the variant only. Equal settings are validated once.
    """
    values = settings_tree(profile, variant, cell)
    settings = _valid_settings(kind, json.dumps(values))
    if settings is None:
        return None, validate(values, _settings_model(kind))[1]
    errors = (*_guidance_errors(values, kind, settings), *request_errors(values, kind, settings))
    return (None, errors) if errors else (settings, ())


def settings_tree(profile: LocatedDict, variant: str, cell: Cell) -> LocatedDict:
    """The settings of one run, unchecked, with the locations at which they were written."""
    own, engine = profile.mapping("variants", variant), profile.mapping("engine")
    if engine.get("python") is not None:
        python = LocatedDict({"python": engine["python"]}, engine.location, engine.locations)
        engine = engine.with_value("options", merge(engine.mapping("options"), python))
    tree = LocatedDict({"variant": variant}, own.location)
    tree = tree.with_value("model", profile.get("model", _DEFAULT_MODEL), profile.location_of("model"))
    layers = {
        "server": [(engine, "options"), (own, "server")],
        "sampling": [(profile, "sampling"), (own, "sampling")],
        "request": [(profile, "request"), (own, "request")],
    }
    for name, sections in layers.items():
        value, location = LocatedDict({}, own.location), own.location
        for section, key in sections:
            if key in section:
                laid_over = merge_fields if name == "request" else merge
                value, location = laid_over(value, section[key]), section.location_of(key)
        tree = tree.with_value(name, value, location)
    tree = tree.with_value("guidance", own.get("guidance"), own.location_of("guidance"))
    for factor, swept in cell.items():
        setting = setting_of(factor)
        location = _swept_location(profile, factor, swept) or replace(own.location, path=setting)
        if swept is None and _is_in_free_section(setting):
            tree = changed_at(tree, setting[:-1], methodcaller("without", setting[-1]))
        else:
            tree = _with_setting(tree, setting, swept, location)
    return tree


def _is_in_free_section(path: tuple[str, ...]) -> bool:
    """True for a path below a section of requests whose keys are free, such as ``request.extra_body``."""
    section, *below = path
    return section == "request" and len(below) > 1 and below[0] in FREE_SECTIONS and all(below)


def _with_setting(tree: LocatedDict, path: tuple[str, ...], value: object, location: Location) -> LocatedDict:
    key, *deeper = path
    if not deeper:
        return tree.with_value(key, value, location)
    return tree.with_value(key, _with_setting(tree.mapping(key), tuple(deeper), value, location))


def _swept_location(profile: LocatedDict, factor: str, value: object) -> Location | None:
    """The location of a value in ``sweep``."""
    values = profile.mapping("sweep").get(factor)
    items = zip(values, values.locations, strict=True) if isinstance(values, LocatedList) else ()
    return next((location for item, location in items if is_same(item, value)), None)


@lru_cache(maxsize=1024)
def _valid_settings(kind: str, text: str) -> VariantSettings | None:
    try:
        return _settings_model(kind).model_validate_json(text)
    except ValidationError:
        return None


@cache
def _settings_model(kind: str) -> type[VariantSettings]:
    """Settings whose server options are those of an engine."""
    return create_model("VariantSettings", __base__=VariantSettings, server=(options_class(kind), ...))


def _guidance_errors(tree: LocatedDict, kind: str, settings: VariantSettings) -> Iterable[LocatedError]:
    if settings.guidance is None:
        return
    if kind not in guiding_kinds():
        problem = (
            f"variant {settings.variant!r} is guided, and engine {kind!r} loads no value model; remove guidance, "
            f"or choose an engine that guides: {', '.join(guiding_kinds())}"
        )
        yield tree.error(problem, "guidance")
        return
    if settings.server.guides_with is None:
        problem = (
            f"variant {settings.variant!r} is guided, but its server loads no value model; "
            f"set variants.{settings.variant}.server.value_model, or remove guidance"
        )
        yield tree.error(problem, "guidance")
    # The guided sampler has no path over the whole vocabulary for these modes. top_k 1 is allowed: it is
    # greedy, and guidance never acts.
    if settings.guidance.mode in EXPONENTIAL_MODES and settings.sampling.top_k < 1:
        sampling = tree.mapping("sampling")
        problem = (
            f"variant {settings.variant!r} is guided with mode {settings.guidance.mode}, which needs a finite "
            f"top_k, and has {settings.sampling.top_k}; set variants.{settings.variant}.sampling.top_k, or sweep "
            "top_k from 1 up"
        )
        yield sampling.error(problem, "top_k") if "top_k" in sampling else tree.error(problem, "guidance")


@cache
def _settings_of_kind(kind: str) -> tuple[str, ...]:
    fields = {
        "server": options_class(kind).model_fields,
        "sampling": Sampling.model_fields,
        "request": RequestOptions.model_fields,
        "guidance": Guidance.model_fields,
    }
    return ("model", *(f"{section}.{key}" for section, keys in fields.items() for key in keys))


def is_same(left: object, right: object) -> bool:
    """Equal values of one type: ``1``, ``1.0`` and ``true`` are three values."""
    return type(left) is type(right) and left == right
