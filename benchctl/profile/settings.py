"""The settings of one run: the profile's, the variant's over them, the cell's over both; and their rules.

model     profile.model
server    engine.options    <  variant.server
sampling  profile.sampling  <  variant.sampling
request   profile.request   <  variant.request    null removes an inherited field
guidance  variant.guidance
and at last each factor of the cell, at the setting it stands for

A load factor stands for a key of ``workload``, which no variant has: it applies to every variant, baseline and
controls included, and says which load a server gets, not how it is set. A cell has a load part, its load point, and
a server part.
"""

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, Final

from pydantic import create_model

from benchctl.guided.params import EXPONENTIAL_MODES
from benchctl.profile.engine_table import ENGINES, guiding_kinds, options_class, request_fields
from benchctl.profile.errors import profile_error, validate
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Guidance, Profile, Sampling, VariantSettings, Workload
from benchctl.profile.sections import RequestOptions, variable_problem, variables_in
from benchctl.profile.yaml import LocatedError, Location, Problem, Steps, left_out, merged, replaced
from benchctl.records.schema import Cell

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
    "max_concurrency": "workload.arrival.max_concurrency",
    "request_rate": "workload.arrival.request_rate",
    "input_len": "workload.input_len",
    "output_len": "workload.output_len",
    "hit_rate": "workload.prefix.hit_rate",
}
"""Factors with a short name, and the setting that each stands for. Any other factor is itself a dotted path."""

FREE_SECTIONS: Final = (
    "extra_body",
    "headers",
    "response_format",
    "structured_outputs",
    "chat_template_kwargs",
)
"""Sections of ``request`` whose keys the writer chooses."""
_PLAIN_HEADERS: Final = frozenset(
    {
        "accept", "accept-charset", "accept-encoding", "accept-language", "anthropic-version", "cache-control",
        "content-language", "content-type", "http-referer", "openai-beta", "priority", "referer", "user-agent",
        "x-title",
    }
)  # fmt: skip
"""Headers whose values are no secrets; those of any other may be, whatever its name."""


def setting_of(factor: str) -> tuple[str, ...]:
    """The path of the setting that a factor stands for."""
    return tuple(FACTOR_SETTINGS.get(factor, factor).split("."))


def is_load_factor(factor: str) -> bool:
    """True for a factor that says which load a server gets."""
    return setting_of(factor)[0] == "workload"


def load_part(cell: Cell) -> Cell:
    """The load point of a cell: its load factors, in their order."""
    return {factor: value for factor, value in cell.items() if is_load_factor(factor)}


def server_part(cell: Cell) -> Cell:
    """The factors of a cell that say how its server is set and what requests ask for, in their order."""
    return {factor: value for factor, value in cell.items() if not is_load_factor(factor)}


def factors_of(profile: Profile, variant: str) -> tuple[str, ...]:
    """The factors of the sweep that apply to a variant: load factors, and others where it is swept."""
    is_fixed = variant == profile.baseline and not profile.sweep_baseline
    swept = False if is_fixed else profile.variants[variant].swept
    return tuple(
        factor for factor in profile.sweep if is_load_factor(factor) or swept is True or (swept and factor in swept)
    )


def cells_of(profile: Profile, variant: str) -> tuple[Cell, ...]:
    """The cells of a variant: every combination of its factors' values, or the listed ones.

    The last factor changes fastest; without any there is one empty cell.
    """
    factors = factors_of(profile, variant)
    if not (profile.cells and factors):
        combinations = product(*(profile.sweep[factor] for factor in factors))
        return tuple(dict(zip(factors, values, strict=True)) for values in combinations)
    cells = [{factor: cell[factor] for factor in factors} for cell in profile.cells]
    return tuple(cell for i, cell in enumerate(cells) if cell not in cells[:i])


def load_points(profile: Profile) -> tuple[Cell, ...]:
    """The load points of a profile in the order of its cells; one empty cell without load factors."""
    points = [load_part(cell) for cell in cells_of(profile, profile.baseline)]
    return tuple(point for i, point in enumerate(points) if point not in points[:i])


def under_load(profile: Profile, cell: Cell) -> Profile:
    """The profile under the load of a cell alone: with the workload of this load point, and no load factors in its
    sweep; itself without one.

    The workload of a run is always taken from here. Raises ProfileError for values that no load can have.
    """
    loaded, problems = _loaded(profile, load_part(cell))
    if loaded is None:
        raise profile_error(
            LocatedError(Location(f"profile {profile.name}", path=path), text) for path, text in problems
        )
    return loaded


def _loaded(profile: Profile, point: Cell) -> tuple[Profile | None, list[Problem]]:
    """The profile under a load, or None and every problem, at paths below ``workload``; kept with the profile."""
    if not point:
        return profile, []
    key = json.dumps(point)
    if key not in profile.loads_by_point:
        values = profile.workload.model_dump(mode="json")
        for factor, value in point.items():
            values = replaced(values, setting_of(factor)[1:], value)
        workload, problems = validate(values, Workload)
        nulls = [setting_of(factor) for factor, value in point.items() if value is None]
        problems = [(("workload", *path), problem) for path, problem in problems if not nulls]
        problems += [(path, "is null, and a load has a number") for path in nulls]
        if workload is not None and workload.prompts_per_slot is not None:
            slots = workload.arrival.max_concurrency or workload.num_prompts
            number = min(workload.num_prompts, workload.prompts_per_slot * slots)
            workload = workload.model_copy(update={"num_prompts": number})
        sweep = {factor: values for factor, values in profile.sweep.items() if not is_load_factor(factor)}
        loaded = None if problems else profile.model_copy(update={"workload": workload, "sweep": sweep})
        profile.loads_by_point[key] = loaded, problems
    return profile.loads_by_point[key]


def factor_problem(factor: str, kind: str) -> str | None:
    """The reason why ``factor`` cannot be swept with an engine of this kind; None when it can."""
    sections = {
        "server": options_class(kind).model_fields,
        "sampling": Sampling.model_fields,
        "request": RequestOptions.model_fields,
        "guidance": Guidance.model_fields,
    }
    loads = filter(is_load_factor, FACTOR_SETTINGS.values()) if ENGINES[kind].serves_requests else ()
    settings = ("model", *loads, *(f"{section}.{key}" for section, keys in sections.items() for key in keys))
    path = setting_of(factor)
    if ".".join(path) in settings or _is_in_free_section(path):
        return None
    hint = did_you_mean(factor, (*FACTOR_SETTINGS, *settings))
    hint = hint or "name one such as server.max_num_seqs or sampling.min_p"
    return f"no factor or setting has this name; factors are {', '.join(FACTOR_SETTINGS)}, or a dotted path; {hint}"


def resolved_settings(profile: Profile, variant: str, cell: Cell) -> tuple[VariantSettings | None, list[Problem]]:
    """The settings of one run, or None and every problem, at paths of ``VariantSettings``.

    They are kept with the profile.
    """
    key = f"{variant} {json.dumps(cell)}"
    if key in profile.settings_by_arm:
        return profile.settings_by_arm[key]
    kind, own, options = profile.engine.kind, profile.variants[variant], profile.engine.options
    if profile.engine.python is not None:
        options = options | {"python": profile.engine.python}
    values: dict[str, Any] = {
        "variant": variant,
        "model": profile.model,
        "server": merged(options, own.server),
        "sampling": merged(profile.sampling.model_dump(mode="json"), own.sampling),
        "request": merged(profile.request.model_dump(mode="json"), own.request, null_removes=True),
        "guidance": own.guidance.model_dump(mode="json") if own.guidance else None,
    }
    for factor, value in server_part(cell).items():
        setting = setting_of(factor)
        is_left_out = value is None and _is_in_free_section(setting)
        values = left_out(values, setting) if is_left_out else replaced(values, setting, value)
    settings, problems = validate(values, _settings_model(kind))
    if settings is not None:
        has_own_top_k = "top_k" in profile.sampling.model_fields_set | own.sampling.keys() or any(
            setting_of(factor) == ("sampling", "top_k") for factor in cell
        )
        problems += _guidance_problems(settings, kind, has_own_top_k=has_own_top_k)
        problems += _request_problems(settings, kind)
    problems += _loaded(profile, load_part(cell))[1]
    profile.settings_by_arm[key] = (None if problems else settings), problems
    return profile.settings_by_arm[key]


def _is_in_free_section(path: tuple[str, ...]) -> bool:
    """True for a path below a section of requests whose keys are free, such as ``request.extra_body``."""
    section, *below = path
    return section == "request" and len(below) > 1 and below[0] in FREE_SECTIONS and all(below)


@cache
def _settings_model(kind: str) -> type[VariantSettings]:
    """Settings whose server options are those of an engine."""
    return create_model("VariantSettings", __base__=VariantSettings, server=(options_class(kind), ...))


def _guidance_problems(settings: VariantSettings, kind: str, *, has_own_top_k: bool) -> Iterator[Problem]:
    guidance, whose = settings.guidance, f"variant {settings.variant!r} is guided"
    if guidance is None:
        return
    can_guide = kind in guiding_kinds()
    rules: tuple[tuple[bool, Steps, str], ...] = (
        (
            not can_guide,
            ("guidance",),
            (
                f"{whose}, and engine {kind!r} loads no value model; remove guidance, "
                f"or choose an engine that guides: {', '.join(guiding_kinds())}"
            ),
        ),
        (
            can_guide and settings.server.guides_with is None,
            ("guidance",),
            (
                f"{whose}, but its server loads no value model; "
                f"set variants.{settings.variant}.server.value_model, or remove guidance"
            ),
        ),
        # The guided sampler has no path over the whole vocabulary for these modes. top_k 1 is allowed: it is
        # greedy, and guidance never acts.
        (
            can_guide and guidance.mode in EXPONENTIAL_MODES and settings.sampling.top_k < 1,
            ("sampling", "top_k") if has_own_top_k else ("guidance",),
            (
                f"{whose} with mode {guidance.mode}, which needs a finite top_k, and has "
                f"{settings.sampling.top_k}; set variants.{settings.variant}.sampling.top_k, or sweep top_k from 1 "
                "up"
            ),
        ),
    )
    yield from ((path, problem) for is_broken, path, problem in rules if is_broken)


def _request_problems(settings: VariantSettings, kind: str) -> Iterator[Problem]:
    """Fields of the requests of one run that servers of this kind do not have."""
    kind = getattr(settings.server, "dialect", kind)
    understood, options, sampling = request_fields(kind), settings.request, settings.sampling
    where, instead = f"servers of {kind!r}", "; leave it out, or choose another engine"
    constraints = understood.constraints
    unknown = (
        []
        if constraints is None
        else [name for name in options.structured_outputs or () if name not in constraints]
    )
    has = ", ".join(sorted(constraints or ())) or "none"
    own_fields = ("custom_params", "vllm_xargs") if settings.guidance else ()
    rules: tuple[tuple[bool, Steps, str], ...] = (
        (
            bool(options.response_format) and not understood.response_format,
            ("request", "response_format"),
            f"{where} have no response_format{instead}",
        ),
        (
            bool(options.chat_template_kwargs) and not understood.chat_template_kwargs,
            ("request", "chat_template_kwargs"),
            f"{where} pass nothing on to the chat template{instead}",
        ),
        (
            bool(unknown),
            ("request", "structured_outputs"),
            f"{where} have {has} of these constraints, not {', '.join(unknown)}{instead}",
        ),
        *(
            (name not in understood.penalties, ("sampling", name), f"{where} have no {name}{instead}")
            for name in sampling.penalties
        ),
        *(
            (
                name in options.extra_body,
                ("request", "extra_body", name),
                f"{name} carries the guidance of this variant; remove it",
            )
            for name in own_fields
        ),
    )
    yield from ((path, problem) for is_broken, path, problem in rules if is_broken)


def header_problems(settings: VariantSettings, *, is_to_send: bool, is_stored: bool) -> Iterator[Problem]:
    """Headers of one run that may be secrets in plain text, and variables that the environment lacks.

    Results of older versions, which ``is_stored`` says, hold what they hold.
    """
    for header, value in settings.request.headers.items():
        variables = variables_in(value)
        if not (variables or is_stored or header.lower() in _PLAIN_HEADERS):
            problem = (
                f"{header} may be a secret, which profiles and results must not hold; put its value into a "
                "variable of the environment, and write ${NAME} here"
            )
            yield ("request", "headers", header), problem
        for variable in variables if is_to_send else ():
            if missing := variable_problem(variable):
                yield ("request", "headers", header), missing


def is_same(left: object, right: object) -> bool:
    """Equal values of one type: ``1``, ``1.0`` and ``true`` are three values."""
    return type(left) is type(right) and left == right
