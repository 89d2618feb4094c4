"""The ladder of controls: the steps from the baseline to a variant, each as a variant of its own.

    baseline ▸ flags ▸ idle ▸ neutral ▸ the variant

flags    the baseline with the variant's server options, but for those that load a value model
idle     the variant's whole server; requests as the baseline's
neutral  the variant with guidance that computes and does not tilt (value_scale 0)

Neighbours differ in one thing, so that their difference is its price. A step that changes nothing is left out, and
one that a swept factor does not reach runs once in a block.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Final

from benchctl.profile.document import Fault, Node, merge, node_from_plain
from benchctl.profile.engine_table import ENGINES, options_class
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.settings import cells_of, factors_of, setting_of, settings_faults, settings_tree
from benchctl.records.run import Cell

_NEUTRAL_SETTING: Final = "guidance.value_scale"
_MEANING: Final = {
    "flags": "control: the baseline with the server options of {}, without its value model",
    "idle": "control: the server of {}, asked as the baseline is",
    "neutral": "control: {} with guidance that computes and does not tilt",
}


def with_controls(profile: Node) -> tuple[Node, tuple[Fault, ...]]:
    """The profile's tree with the steps of every variant that asks for ``controls``; again gives the same tree."""
    variants = profile.child("variants")
    baseline, kind = _text(profile, "baseline") or "baseline", _text(profile.child("engine"), "kind")
    if variants is None or baseline not in variants.entries() or kind not in ENGINES:
        return profile, ()
    faults: list[Fault] = []
    for name, variant in variants.entries().items():
        asked = variant.child("controls")
        if asked is None or asked.value is not True:
            continue
        if name == baseline:
            problem = "there are no steps from the baseline to itself; set controls on the variant that is studied"
            faults.append(Fault(asked.place, asked.path, problem))
            continue
        profile, found = _Ladder(profile, baseline, name, kind).built()
        faults += found
    return profile, tuple(faults)


class _Ladder:
    """The steps to one variant."""

    def __init__(self, profile: Node, baseline: str, name: str, kind: str) -> None:
        self._profile, self._baseline, self._name, self._kind = profile, baseline, name, kind
        variants = profile.entries()["variants"].entries()
        self._below, self._own = variants[baseline], variants[name]
        self._loading = options_class(kind).VALUE_MODEL_OPTIONS
        plain = (profile.child("sweep") or profile.with_entries({})).plain()
        sweep = plain if isinstance(plain, dict) and all(isinstance(v, list) for v in plain.values()) else {}
        self._factors = {
            name: values for name, values in sweep.items() if name in factors_of(_swept(self._own), sweep)
        }
        self._num_factors = len(sweep)

    def built(self) -> tuple[Node, tuple[Fault, ...]]:
        """The profile with those steps that differ from their neighbours, each before the variant."""
        known = self._profile.entries()["variants"].entries()
        steps = {f"{self._name}-{rung}": self._step(rung, parts) for rung, parts in self._parts()}
        faults = [
            Fault(known[step].place, known[step].path, f"controls of {self._name!r} would make a variant of this "
                  "name; call this one otherwise")
            for step in steps
            if step in known and known[step].child("control") is None
        ]  # fmt: skip
        if faults:
            return self._profile, tuple(faults)
        steps = {step: known.get(step, node) for step, node in steps.items()}
        kept = self._different(steps)
        tree = self._with_variants({step: node for step, node in kept.items() if step not in known})
        return self._allowing(tree, kept), ()

    def _parts(self) -> Iterator[tuple[str, dict[str, Node | None]]]:
        """What each step takes from the baseline and from the variant, by section."""
        empty = self._own.with_entries({})
        server = self._own.child("server") or empty
        options = {key: node for key, node in server.entries().items() if key not in self._loading}
        flags = merge(self._below.child("server"), server.with_entries(options))
        asks = {section: self._below.child(section) for section in ("sampling", "guidance")}
        yield "flags", {"server": flags, **asks}
        yield "idle", {"server": server, "sampling": asks["sampling"], "guidance": None}
        guidance = self._own.child("guidance")
        if guidance is not None and isinstance(guidance.value, Mapping):
            neutral = node_from_plain(0.0, guidance.place, (*guidance.path, "value_scale"))
            tilt_free = merge(guidance, guidance.with_entries({"value_scale": neutral}))
            yield "neutral", {"server": server, "sampling": self._own.child("sampling"), "guidance": tilt_free}

    def _step(self, rung: str, parts: Mapping[str, Node | None]) -> Node:
        reached = [factor for factor in self._factors if self._reaches(rung, setting_of(factor))]
        swept = len(reached) == self._num_factors or (reached or False)
        said = {
            "description": _MEANING[rung].format(self._name),
            "swept": swept,
            "control": {"of": self._name, "rung": rung},
        }
        own = self._own
        written = {key: node_from_plain(value, own.place, (*own.path, key)) for key, value in said.items()}
        return own.with_entries({**written, **{key: node for key, node in parts.items() if node is not None}})

    def _reaches(self, rung: str, setting: tuple[str, ...]) -> bool:
        """Whether a swept setting changes a step."""
        if rung == "neutral":
            return ".".join(setting) != _NEUTRAL_SETTING
        if setting[0] not in {"model", "server"}:
            return False
        return rung == "idle" or setting[-1] not in self._loading

    def _different(self, steps: Mapping[str, Node]) -> dict[str, Node]:
        """The steps that differ from the one kept before them in some cell, and from the variant itself."""
        tree, kept, before = self._with_variants(steps), dict[str, Node](), self._baseline
        for step, node in steps.items():
            if not self._is_same(tree, before, step) and not self._is_same(tree, step, self._name):
                kept[step] = node
                before = step
        return kept

    def _is_same(self, tree: Node, left: str, right: str) -> bool:
        cells = cells_of(self._factors)
        return all((found := self._settings(tree, left, cell)) and found == self._settings(tree, right, cell)
                   for cell in cells)  # fmt: skip

    def _settings(self, tree: Node, variant: str, cell: Cell) -> VariantSettings | None:
        """Settings of a variant in a cell, without its name; None where they are faulty."""
        factors = _factor_names(tree.entries()["variants"].entries()[variant], cell)
        own = {} if variant == self._baseline else {factor: cell[factor] for factor in factors}
        settings, _ = settings_faults(settings_tree(tree, variant, own), self._kind)
        return None if settings is None else settings.model_copy(update={"variant": ""})

    def _with_variants(self, steps: Mapping[str, Node]) -> Node:
        """The profile with ``steps`` right before the variant."""
        variants, entries = self._profile.entries()["variants"], dict[str, Node]()
        for name, node in variants.entries().items():
            if name == self._name:
                entries |= steps
            if name not in steps or name == self._name:
                entries[name] = node
        return self._profile.with_entries({**self._profile.entries(), "variants": variants.with_entries(entries)})

    def _allowing(self, tree: Node, kept: Mapping[str, Node]) -> Node:
        """What a neutral step differs in from its variant is a declared difference."""
        allowed = tree.child("allowed_differences")
        patterns = allowed.plain() if allowed else []
        is_listed = isinstance(patterns, list) and any(fnmatchcase(_NEUTRAL_SETTING, str(p)) for p in patterns)
        if f"{self._name}-neutral" not in kept or is_listed or not isinstance(patterns, list):
            return tree
        place = allowed or self._own
        extended = node_from_plain([*patterns, _NEUTRAL_SETTING], place.place, ("allowed_differences",))
        return tree.with_entries({**tree.entries(), "allowed_differences": extended})


def _factor_names(variant: Node, cell: Cell) -> tuple[str, ...]:
    return tuple(factors_of(_swept(variant), cell))


def _swept(variant: Node) -> bool | list[str]:
    swept = variant.child("swept")
    plain = True if swept is None else swept.plain()
    return plain if isinstance(plain, bool | list) else True


def _text(node: Node | None, key: str) -> str | None:
    child = node.child(key) if node is not None else None
    return child.value if child is not None and isinstance(child.value, str) else None


def ladder_of(profile: Profile, name: str) -> tuple[str, ...]:
    """The baseline, the steps to a variant in their order, and the variant."""
    steps = [
        step
        for step, variant in profile.variants.items()
        if variant.control is not None and variant.control.of == name
    ]
    return (profile.baseline, *steps, name)
