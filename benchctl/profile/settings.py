"""What one run uses: the profile's settings, the variant's over them, the cell's over both.

model     profile.model
server    engine.options    <  variant.server
sampling  profile.sampling  <  variant.sampling
guidance  variant.guidance
and at last each factor of the cell, at the setting it stands for
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, reduce
from itertools import product
from typing import Final, TypeAlias, TypeVar

from pydantic import create_model

from benchctl.profile.document import Fault, Node, Step, merge, node_from_plain
from benchctl.profile.engine_table import ENGINES, guiding_kinds, options_class
from benchctl.profile.faults import validate
from benchctl.profile.locate import nearest
from benchctl.profile.model import Guidance, Profile, Sampling, VariantSettings
from benchctl.records.run import Cell

V = TypeVar("V")
Values: TypeAlias = Sequence[str | int | float | bool | None]
"""What a factor is swept over."""

FACTOR_SETTINGS: Final = {
    "model": "model",
    "top_k": "sampling.top_k",
    "value_model": "server.value_model",
    "value_scale": "guidance.value_scale",
    "max_num_seqs": "server.max_num_seqs",
}
"""Factors with a short name, and the setting that each stands for. Any other factor is itself a dotted path."""

_DEFAULT_MODEL: Final = Profile.model_fields["model"].default
_FINITE_TOP_K_MODES: Final = {"centered_exp", "value_bias"}


def setting_of(factor: str) -> tuple[str, ...]:
    """The path of the setting that a factor stands for."""
    return tuple(FACTOR_SETTINGS.get(factor, factor).split("."))


def cells_of(sweep: Mapping[str, Values]) -> tuple[Cell, ...]:
    """Every combination of the factors' values, the last factor changing fastest; one empty cell without any."""
    return tuple(dict(zip(sweep, values, strict=True)) for values in product(*sweep.values()))


def factors_of(swept: bool | Sequence[str], sweep: Mapping[str, V]) -> dict[str, V]:
    """The factors of a sweep that apply to a variant whose ``swept`` says this."""
    if isinstance(swept, bool):
        return dict(sweep) if swept else {}
    return {factor: values for factor, values in sweep.items() if factor in swept}


def factor_problem(factor: str, kind: str) -> str | None:
    """Why ``factor`` cannot be swept with an engine of this kind; None when it can."""
    known = _known_settings(kind)
    setting = ".".join(setting_of(factor))
    if setting in known:
        return None
    near = nearest(factor, (*FACTOR_SETTINGS, *known))
    hint = f"did you mean {near!r}?" if near else "name one such as server.max_num_seqs or sampling.min_p"
    return f"no factor or setting has this name; factors are {', '.join(FACTOR_SETTINGS)}, or a dotted path; {hint}"


def settings_tree(profile: Node, variant: str, cell: Cell) -> Node:
    """The settings of one run as a tree whose values remember where they were written."""
    own = _at(profile, ("variants", variant)) or profile
    tree = Node(
        {
            "variant": node_from_plain(variant, own.place, own.path),
            "model": profile.child("model") or node_from_plain(_DEFAULT_MODEL, profile.place),
            "server": _over(own, *_engine_layers(profile), own.child("server")),
            "sampling": _over(own, profile.child("sampling"), own.child("sampling")),
            "guidance": own.child("guidance") or node_from_plain(None, own.place, own.path),
        },
        own.place,
        own.path,
    )
    for factor, value in cell.items():
        setting = setting_of(factor)
        node = _swept_value(profile, factor, value) or node_from_plain(value, own.place, setting)
        tree = _set(tree, setting, node)
    return tree


def settings_faults(tree: Node, kind: str) -> tuple[VariantSettings | None, tuple[Fault, ...]]:
    """The settings of one run on an engine of this kind, or None and what is wrong with them."""
    settings, faults = validate(tree, _settings_model(kind))
    if settings is None:
        return None, faults
    faults = tuple(_guidance_faults(tree, kind, settings))
    return (None, faults) if faults else (settings, ())


@cache
def _settings_model(kind: str) -> type[VariantSettings]:
    """Settings whose server options are those of an engine."""
    return create_model("VariantSettings", __base__=VariantSettings, server=(options_class(kind), ...))


def _guidance_faults(tree: Node, kind: str, settings: VariantSettings) -> Iterable[Fault]:
    guidance = tree.child("guidance")
    if settings.guidance is None or guidance is None:
        return
    if kind not in guiding_kinds():
        problem = (
            f"variant {settings.variant!r} is guided, and engine {kind!r} loads no value model; remove guidance, "
            f"or choose an engine that guides: {', '.join(guiding_kinds())}"
        )
        yield Fault(guidance.place, guidance.path, problem)
        return
    if settings.server.guides_with is None:
        problem = (
            f"variant {settings.variant!r} is guided, but its server loads no value model; "
            f"set variants.{settings.variant}.server.value_model, or remove guidance"
        )
        yield Fault(guidance.place, guidance.path, problem)
    # The guided sampler has no path over the whole vocabulary for these modes. top_k 1 is allowed: it is
    # greedy, and guidance never acts.
    if settings.guidance.mode in _FINITE_TOP_K_MODES and settings.sampling.top_k < 1:
        top_k = _at(tree, ("sampling", "top_k")) or guidance
        problem = (
            f"variant {settings.variant!r} is guided with mode {settings.guidance.mode}, which needs a finite "
            f"top_k, and has {settings.sampling.top_k}; set variants.{settings.variant}.sampling.top_k, or sweep "
            "top_k from 1 up"
        )
        yield Fault(top_k.place, top_k.path, problem)


@cache
def _known_settings(kind: str) -> tuple[str, ...]:
    options = options_class(kind) if kind in ENGINES else None
    return (
        "model",
        *(f"server.{name}" for name in (options.model_fields if options else ())),
        *(f"sampling.{name}" for name in Sampling.model_fields),
        *(f"guidance.{name}" for name in Guidance.model_fields),
    )


def _at(node: Node, path: Iterable[Step]) -> Node | None:
    found: Node | None = node
    for step in path:
        found = found.child(step) if found else None
    return found


def _engine_layers(profile: Node) -> tuple[Node | None, Node | None]:
    """What the engine's section says of every server: its options, and its interpreter over those."""
    engine = profile.child("engine")
    python = engine.child("python") if engine else None
    if engine is None or python is None or python.value is None:
        return _at(profile, ("engine", "options")), None
    return engine.child("options"), engine.with_entries({"python": python})


def _over(owner: Node, *layers: Node | None) -> Node:
    """The layers of one section, each over those before it; no entries at all where none is written."""
    written = [layer for layer in layers if layer is not None]
    return reduce(merge, written) if written else owner.with_entries({})


def _set(tree: Node, path: tuple[str, ...], value: Node) -> Node:
    for depth in range(len(path), 0, -1):
        value = (_at(tree, path[: depth - 1]) or tree).with_entries({path[depth - 1]: value})
    return merge(tree, value)


def _swept_value(profile: Node, factor: str, value: object) -> Node | None:
    """The node of a sweep that holds this value."""
    values = _at(profile, ("sweep", factor))
    items = values.value if values and isinstance(values.value, tuple) else ()
    return next((item for item in items if is_same(item.value, value)), None)


def is_same(left: object, right: object) -> bool:
    """Equal values of one type: ``1``, ``1.0`` and ``true`` are three values."""
    return type(left) is type(right) and left == right


def factor_name(factor: str) -> str:
    """A factor with the setting it stands for, as messages show it."""
    setting = ".".join(setting_of(factor))
    return factor if setting == factor else f"{factor} ({setting})"
