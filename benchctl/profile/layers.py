"""From files and the command line to one document: ``extends``, presets, overlays for engines, ``--set``.

Each source is read once, and where each value was written stays beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

from benchctl.profile.engine_options import ENGINES, engine_spec, guiding_kinds
from benchctl.profile.files import (
    did_you_mean,
    display_path,
    is_path,
    known_profiles_text,
    named_files,
    preset_files,
    profile_directories,
    read_file,
)
from benchctl.profile.model import Profile
from benchctl.profile.yaml import (
    Document,
    LocatedError,
    Location,
    Step,
    follow,
    plain_document,
    read_document,
    replaced,
    value_text,
)
from benchctl.untrusted.limits import EXTENDED_FILES

_MODEL_KEYS: Final = (
    ("model",),
    ("sweep", "model"),
    ("sweep", "value_model"),
    ("sweep", "server.value_model"),
    ("engine", "options", "value_model"),
)
"""Keys that name models, beside those of variants."""
_UNGUIDED: Final = "for_unguided_engines"
_BY_KIND: Final = "per_engine"


class Layers:
    """Reads the sources of one profile, and collects their errors."""

    def __init__(self) -> None:
        self.errors: list[LocatedError] = []
        self._files: dict[Path, Document] = {}

    @property
    def is_whole(self) -> bool:
        """False when some source could not be read; keys that are missing then are not reported."""
        return not any(error.hides_keys for error in self.errors)

    def file(self, path: Path) -> Document:
        """One file, by itself; each is read once."""
        if path not in self._files:
            self._files[path] = read_file(path, self.errors)
        return self._files[path]

    def assignment(self, assignment: str) -> Document:
        """The layer of ``--set a.b=c``; c is a YAML value. Below ``sweep`` the rest of the path is one factor."""
        path_part, equals, value_part = assignment.partition("=")
        path = tuple(path_part.strip().split("."))
        if not equals or not all(path):
            problem = f"{value_text(assignment)} is not of the form path=value, for example workload.num_prompts=3"
            self.errors.append(LocatedError(Location("--set"), problem))
            return plain_document({}, "--set")
        if path[0] == "sweep" and path[1:]:
            path = ("sweep", ".".join(path[1:]))
        return read_document(value_part, "--set", self.errors, path=path)

    def profile(self, path: Path, above: Sequence[Document]) -> Document:
        """A file over what it extends, as its engine reads them, and ``above`` over it.

        A file without a name is called like the file; names and descriptions of those below it are not its own.
        """
        files, location = self._chain(path), Location(display_path(path), 1)
        tree = Document({}, {(): location})
        kind = self.with_preset(reduce(_over, (*files, *above), tree)).mapping("engine").get("kind")
        kind = kind if isinstance(kind, str) and kind in ENGINES else None
        is_unguided = kind is not None and not engine_spec(kind).guides
        for file in files:
            layer = self._for_engine(file, kind, is_unguided=is_unguided)
            # A variant that a file drops from those below it may exist there for engines that guide only.
            drops_idly = is_unguided and file is not files[0]
            tree = _over(tree.without("name").without("description"), layer, drops_idly=drops_idly)
        tree = tree.over(Document({"name": path.stem}, {("name",): replace(location, path=("name",))}))
        return self.with_preset(reduce(_over, above, tree))

    def with_preset(self, tree: Document) -> Document:
        """Replace the name of an engine preset by the preset's own text, with the profile's options over it."""
        tree = _with_engine_mapping(tree)
        if "preset" not in tree.mapping("engine"):
            return tree
        own = tree.without("engine", "preset")
        if "kind" in own.mapping("engine"):
            self.refuse(
                tree, "has both preset and kind; a preset has its own kind, so remove one of the two", "engine"
            )
            return own
        preset = self._preset(tree)
        if preset is None:
            return tree.without("engine")
        locations = {("engine", *path): location for path, location in preset.locations.items()}
        below = Document({"engine": preset.without("models").values}, {(): tree.location(()), **locations})
        return _with_models(own.over(below), preset.mapping("models"))

    def refuse(self, tree: Document, problem: str, *path: Step) -> None:
        """Add an error after which the profile is not whole."""
        self.errors.append(LocatedError(tree.location(path), problem, hides_keys=True))

    def _chain(self, path: Path) -> list[Document]:
        """The files that a file extends, each before the one that extends it, and itself."""
        files, paths = list[Document](), [path]
        while len(paths) > len(files):
            document = self.file(paths[-1])
            if "extends" in document.values:
                base = _base_file(document.values["extends"], paths)
                if isinstance(base, Path):
                    paths.append(base)
                else:
                    self.refuse(document, base, "extends")
            files.append(document.without("extends"))
        return files[::-1]

    def _preset(self, tree: Document) -> Document | None:
        """The preset that the engine names; for a bare kind without a file, an engine without options."""
        name, files, kinds = tree.mapping("engine")["preset"], preset_files(), tuple(ENGINES)
        if isinstance(name, str) and name in files:
            return self.file(files[name])
        location = tree.location(("engine", "preset"))
        if name in kinds:
            return Document({"kind": name}, {(): location, ("kind",): location})
        problem = (
            f"{value_text(name)} is neither an engine preset nor a kind of engine; presets are {', '.join(files)}, "
            f"kinds are {', '.join(kinds)}{did_you_mean(name, (*files, *kinds), '; ')}"
        )
        self.refuse(tree, problem, "engine", "preset")
        return None

    def _for_engine(self, tree: Document, kind: str | None, *, is_unguided: bool) -> Document:
        """A file with its sections for this kind of engine laid over it; those for others are left out."""
        unguided, by_kind = tree.values.get(_UNGUIDED, {}), tree.values.get(_BY_KIND, {})
        rest = tree.without(_UNGUIDED).without(_BY_KIND)
        if unguided is None and is_unguided:
            needs = f"this experiment needs an engine that guides: {', '.join(guiding_kinds())}"
            self.refuse(tree, needs, _UNGUIDED)
        elif not isinstance(unguided, dict | None):
            problem = f"is {value_text(unguided)}; write the keys that replace others on engines that cannot guide"
            self.refuse(tree, problem, _UNGUIDED)
        elif is_unguided:
            rest = _over(rest, tree.part(_UNGUIDED))
        if not isinstance(by_kind, dict):
            problem = f"is {value_text(by_kind)}; write kinds of engines, and below each the keys to replace"
            self.refuse(tree, problem, _BY_KIND)
            return rest
        for name, overlay in by_kind.items():
            if refusal := _overlay_problem(name, overlay):
                self.refuse(tree, refusal, _BY_KIND, name)
            elif name == kind:
                rest = _over(rest, tree.part(_BY_KIND, name))
        return rest


def _over(below: Document, above: Document, *, drops_idly: bool = False) -> Document:
    """One layer over another; a null drops a variant or a factor, and another engine replaces all of the engine.

    With ``drops_idly`` a null may stand for a variant or factor that is not there.
    """
    above = _with_engine_mapping(above)
    if above.mapping("engine").keys() & {"kind", "preset"}:
        below = below.without("engine")
    for section in ("variants", "sweep"):
        for key, value in above.mapping(section).items():
            if value is None and (drops_idly or key in below.mapping(section)):
                below, above = below.without(section, key), above.without(section, key)
    return above.over(below)


def _with_engine_mapping(tree: Document) -> Document:
    """``engine: sim`` as ``engine: {preset: sim}``."""
    engine = tree.values.get("engine")
    if not isinstance(engine, str):
        return tree
    locations = {**tree.locations, ("engine", "preset"): tree.location(("engine",))}
    return Document({**tree.values, "engine": {"preset": engine}}, locations)


def _with_models(tree: Document, substitutes: Mapping[str, Any]) -> Document:
    """The profile with every model replaced that has a substitute."""
    values = {"model": Profile.model_fields["model"].default, **tree.values} if substitutes else tree.values
    variants = [("variants", name, "server", "value_model") for name in tree.mapping("variants")]
    for path in (*_MODEL_KEYS, *variants):
        model, existing = follow(values, path)
        if isinstance(model, list):
            model = [substitutes.get(each, each) if isinstance(each, str) else each for each in model]
        elif isinstance(model, str):
            model = substitutes.get(model, model)
        if existing == path:
            values = replaced(values, path, model)
    return Document(values, tree.locations)


def _overlay_problem(kind: str, overlay: Any) -> str | None:
    """The reason why ``per_engine.<kind>`` cannot go over a profile."""
    if kind not in ENGINES:
        return f"is not a kind of engine; kinds are {', '.join(ENGINES)}{did_you_mean(kind, ENGINES, '; ')}"
    if not isinstance(overlay, dict):
        return f"is {value_text(overlay)}; write the keys to replace on {kind}"
    engine = overlay.get("engine", {})
    if not isinstance(engine, dict) or engine.keys() & {"kind", "preset"}:
        return "chooses another engine; write only its options"
    return None


def _base_file(name: Any, paths: Sequence[Path]) -> Path | str:
    """The file that ``extends`` names in the last of ``paths``, each extending the next; else the problem."""
    if not isinstance(name, str) or not name:
        return f"is {value_text(name)}; write the name or the path of one profile"
    path, resolved = paths[-1], [file.resolve() for file in paths]
    if is_path(name):
        base = path.parent / name
        if not base.is_file():
            kind = "not a regular" if base.exists() else "no such"
            return f"{display_path(base)}: {kind} file; a path is relative to the file that extends"
    else:
        # A file may carry the name of the one it extends: its own profiles/x.yaml over the built-in x.
        named = named_files(name, (path.parent, *profile_directories()))
        base = next((file for file in named if file.resolve() != resolved[-1]), path)
        if base == path:
            return f"no other profile is called {name!r}. {known_profiles_text(name)}"
    if base.resolve() in resolved:
        circle = " -> ".join(display_path(file) for file in (*paths[resolved.index(base.resolve()) :], base))
        return f"goes round in a circle: {circle}; remove one"
    if len(paths) > EXTENDED_FILES:
        return f"is the {len(paths)}th file in a row, and {EXTENDED_FILES} may extend one another; join some"
    return base
