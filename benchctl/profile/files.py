"""Profiles and engine presets: found by name, read, and laid over one another to one document.

A profile goes over what it extends, and the command line over both; below all lies the preset of the engine. Each
source is read once, and where each value was written stays beside it. Nothing is validated here, so that faulty
files are listed too.
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

from benchctl.errors import ProfileError
from benchctl.profile.bounds import DEFAULT_MODEL
from benchctl.profile.engine_table import ENGINES, guiding_kinds
from benchctl.profile.yaml import (
    Document,
    LocatedError,
    Location,
    Step,
    follow,
    left_out,
    merged,
    plain_document,
    read_document,
    replaced,
    size_problem,
    text_problem,
    value_text,
)
from benchctl.untrusted import EXTENDED_FILES, PROFILE_BYTES

_PACKAGE = Path(__file__).resolve().parents[1]


def builtin_profiles() -> Path:
    """The directory of the profiles that benchctl carries."""
    installed = _PACKAGE / "_profiles"
    return installed if installed.is_dir() else _PACKAGE.parent / "profiles"


def profile_directories() -> tuple[Path, ...]:
    """Directories in which a name is looked up; the first match wins."""
    return (Path("profiles"), builtin_profiles())


def is_path(name_or_path: str) -> bool:
    """A path ends in .yaml or .yml, or has a separator; anything else is a name."""
    return name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path


def profile_file(name_or_path: str) -> Path:
    """The file of a profile; a name also stands for a file of the working directory, as ``init`` writes one.

    Raises ProfileError, naming the nearest known profile, when there is none.
    """
    if is_path(name_or_path):
        path = Path(name_or_path)
        if not path.is_file():
            raise ProfileError(
                f"{name_or_path}: {'not a regular' if path.exists() else 'no such'} file. "
                f"{known_profiles_text(path.stem)}"
            )
        return path
    carried = profile_directories()
    for path in named_files(name_or_path, (carried[0], Path(), *carried[1:])):
        return path
    raise ProfileError(f"no profile is called {name_or_path!r}. {known_profiles_text(name_or_path)}")


def named_files(name: str, directories: Iterable[Path]) -> Iterator[Path]:
    """The files that a name stands for, best first."""
    for directory in directories:
        for suffix in (".yaml", ".yml"):
            path = directory / f"{name}{suffix}"
            if path.is_file():
                yield path


def profile_files() -> dict[str, Path]:
    """Every profile that is found by name, in the order of the names."""
    return _files_by_name(profile_directories())


def preset_files() -> dict[str, Path]:
    """Every engine preset that is found by name, in the order of the names."""
    return _files_by_name(directory / "engines" for directory in profile_directories())


def _files_by_name(directories: Iterable[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for directory in directories:
        for path in sorted((*directory.glob("*.yaml"), *directory.glob("*.yml"))):
            files.setdefault(path.stem, path)
    return dict(sorted(files.items()))


def known_profiles_text(name: str) -> str:
    """Part of a message about a missing profile: ``Did you mean 'x'? Known profiles: x, y``."""
    names = profile_files()
    hint = did_you_mean(name, names)
    return f"{hint.capitalize()} Known profiles: {', '.join(names) or 'none'}".strip()


def did_you_mean(word: object, names: Iterable[str], prefix: str = "") -> str:
    """The hint ``did you mean 'x'?`` after ``prefix``, where ``word`` probably misspells a name; else no text."""
    matches = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6) if isinstance(word, str) else ()
    return f"{prefix}did you mean {matches[0]!r}?" if matches else ""


def display_path(path: Path) -> str:
    """A path as messages show it: relative to the current directory when it lies below it."""
    absolute, current = path.resolve(), Path.cwd()
    return str(absolute.relative_to(current)) if absolute.is_relative_to(current) else str(absolute)


OWN: Final = "yours"
"""Group of profiles that benchctl does not carry."""
GROUPS: Final = {
    "start here": ("flag", "two-builds", "own-prompts", "aa", "ci-smoke"),
    "sampler and guidance": (
        "topk-sweep",
        "structured-output",
        "lora",
        "controls",
        "natural",
        "model-size-sweep",
        "guided-idle",
        "noop-skip",
        "fused-vs-two-phase",
        "guided-switches",
        "lenvm-50x16",
        "lenvm-model-sizes",
    ),
    "speculation": ("speculation", "bonus-tokens"),
    "load": (
        "load-curve",
        "capacity",
        "chat",
        "rate-limited",
        "azure-replay",
        "rtx4090-replay",
        "llm-mock-batch",
        "llm-mock-cache",
    ),
    "models and calibration": (*(f"steptime-w{number}" for number in range(1, 6)), "steptime-v1"),
}
"""The profiles that benchctl carries by what they are for, each group in the order to read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEntry:
    """A profile that is found by name."""

    name: str
    path: Path
    description: str


def list_profiles() -> tuple[ProfileEntry, ...]:
    """The profiles that are found by name, in the order of their names; faulty ones too."""
    return tuple(
        ProfileEntry(name=name, path=path, description=_description(path)) for name, path in profile_files().items()
    )


def grouped_profiles() -> dict[str, tuple[ProfileEntry, ...]]:
    """The profiles that are found by name, in their groups; those that benchctl does not carry come first."""
    entries = {entry.name: entry for entry in list_profiles()}
    carried = {name for names in GROUPS.values() for name in names}
    groups = {
        OWN: tuple(entry for name, entry in entries.items() if name not in carried),
        **{title: tuple(entries[name] for name in names if name in entries) for title, names in GROUPS.items()},
    }
    return {title: members for title, members in groups.items() if members}


def _description(path: Path) -> str:
    values = read_file(path, []).values
    if not values:
        return "not readable; 'benchctl profiles validate' reports the error"
    return str(values.get("description", ""))


def read_file(path: Path, errors: list[LocatedError]) -> Document:
    """One profile or preset by itself; an empty one, with an error more, where it cannot be read."""
    source = display_path(path)
    try:
        with path.open("rb") as file:
            content = file.read(PROFILE_BYTES + 1)
            size = max(len(content), os.fstat(file.fileno()).st_size)
        if size <= PROFILE_BYTES:
            return read_document(content.decode(), source, errors)
        problem = size_problem(size)
    except UnicodeDecodeError as error:
        problem = f"not readable as UTF-8: {error.reason} at byte {error.start}; save the file as UTF-8"
    except OSError as error:
        problem = f"not readable: {error.strerror}; check the file and its permissions"
    errors.append(LocatedError(Location(source), problem, hides_keys=True))
    return Document({}, {(): Location(source)})


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


def extended_files(path: Path, errors: list[LocatedError]) -> list[Document]:
    """The files that a profile extends, each before the one that extends it, and the profile's own.

    A profile without a name is called like its file.
    """
    files, paths = list[Document](), [path]
    while len(paths) > len(files):
        document = read_file(paths[-1], errors)
        if "extends" in document.values:
            base = _base_file(document.values["extends"], paths)
            if isinstance(base, Path):
                paths.append(base)
            else:
                refuse(errors, document, base, "extends")
        files.append(document)
    name = Document({"name": path.stem}, {("name",): Location(display_path(path), 1, ("name",))})
    files[0] = _over(name, files[0])
    return files[::-1]


def _base_file(name: Any, paths: Sequence[Path]) -> Path | str:
    """The file that ``extends`` names in the last of ``paths``, each extending the next; else the problem."""
    if not isinstance(name, str) or not name:
        return f"is {value_text(name)}; write the name or the path of one profile"
    if (refusal := text_problem(name)) is not None:
        return refusal
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


def assigned(assignment: str, errors: list[LocatedError]) -> Document:
    """The layer of ``--set a.b=c``; c is a YAML value. Below ``sweep`` the rest of the path is one factor."""
    path_part, equals, value_part = assignment.partition("=")
    path = tuple(path_part.strip().split("."))
    if not equals or not all(path):
        problem = f"{value_text(assignment)} is not of the form path=value, for example workload.num_prompts=3"
        errors.append(LocatedError(Location("--set"), problem))
        return plain_document({}, "--set")
    if path[0] == "sweep" and path[1:]:
        path = ("sweep", ".".join(path[1:]))
    return read_document(value_part, "--set", errors, path=path)


def layered(files: Sequence[Document], above: Sequence[Document], errors: list[LocatedError]) -> Document:
    """The preset of the engine, the files over it, each as that engine reads it, and ``above`` over them all.

    Name and description are those of the last file.
    """
    documents = [*files, *above]
    preset, num_replaced = _preset(documents, errors)
    layers = [
        document.without("engine") if i < num_replaced else document.without("engine", "preset")
        for i, document in enumerate(documents)
    ]
    kind = preset.values.get("kind")
    is_unguided = isinstance(kind, str) and kind in ENGINES and not ENGINES[kind].guides
    engine = {"engine": preset.without("models").values} if preset.values else {}
    locations = {("engine", *path): location for path, location in preset.locations.items()}
    tree = Document(engine, {(): layers[0].location(()), **locations})
    for i, file in enumerate(layers[: len(files)]):
        tree = tree.without("name").without("description")
        plain = file.without("extends").without(_UNGUIDED).without(_BY_KIND)
        for layer in (plain, *_overlays(file, kind, is_unguided, errors)):
            # A variant that a file drops from those below it may exist there for engines that guide only.
            tree = _over(tree, layer, drops_idly=is_unguided and i > 0)
    tree = reduce(_over, layers[len(files) :], tree)
    substitutes = preset.mapping("models")
    return _with_models(tree, substitutes) if substitutes else tree


def refuse(errors: list[LocatedError], tree: Document, problem: str, *path: Step) -> None:
    """Add an error after which a profile is not whole."""
    errors.append(LocatedError(tree.location(path), problem, hides_keys=True))


def _preset(layers: Sequence[Document], errors: list[LocatedError]) -> tuple[Document, int]:
    """The preset of the last engine that a layer names, and the number of layers whose engine it replaces.

    A kind without a file is a preset without options.
    """
    naming = [(i, path) for i, layer in enumerate(layers) if (path := _engine_name(layer))]
    if not naming:
        return Document({}, {}), 0
    top, path = naming[-1]
    layer, files = layers[top], preset_files()
    num_replaced = top + 1 if path == ("engine",) else top  # a text has no options beside the name
    name, _ = follow(layer.values, path)
    location = layer.location(path)
    is_kind = path[-1] == "kind"
    if is_kind and "preset" in layer.mapping("engine"):
        problem = "has both preset and kind; a preset has its own kind, so remove one of the two"
        refuse(errors, layer, problem, "engine")
    if not is_kind and isinstance(name, str) and name in files:
        preset = read_file(files[name], errors)
        here, options = (replace(location, path=path) for path in (("engine",), ("engine", "options")))
        # what a preset lacks is missing where it is named
        return Document(preset.values, {**preset.locations, (): here, ("options",): options}), num_replaced
    if is_kind or (isinstance(name, str) and name in ENGINES):
        return Document({"kind": name}, {(): location, ("kind",): location}), num_replaced
    problem = (
        f"{value_text(name)} is neither an engine preset nor a kind of engine; presets are {', '.join(files)}, "
        f"kinds are {', '.join(ENGINES)}{did_you_mean(name, (*files, *ENGINES), '; ')}"
    )
    refuse(errors, layer, problem, *path)
    return Document({}, {}), len(layers)


def _engine_name(layer: Document) -> tuple[str, ...]:
    """The path of the key by which a layer names its engine; empty where it names none."""
    if isinstance(layer.values.get("engine"), str):
        return ("engine",)
    return next((("engine", key) for key in ("kind", "preset") if key in layer.mapping("engine")), ())


def _overlays(file: Document, kind: Any, is_unguided: bool, errors: list[LocatedError]) -> Iterator[Document]:
    """The sections of a file that go over the rest of it with this kind of engine."""
    unguided, by_kind = file.values.get(_UNGUIDED, {}), file.values.get(_BY_KIND, {})
    if unguided is None and is_unguided:
        needs = f"this experiment needs an engine that guides: {', '.join(guiding_kinds())}"
        refuse(errors, file, needs, _UNGUIDED)
    elif not isinstance(unguided, dict | None):
        problem = f"is {value_text(unguided)}; write the keys that replace others on engines that cannot guide"
        refuse(errors, file, problem, _UNGUIDED)
    elif is_unguided:
        yield file.part(_UNGUIDED)
    if not isinstance(by_kind, dict):
        problem = f"is {value_text(by_kind)}; write kinds of engines, and below each the keys to replace"
        refuse(errors, file, problem, _BY_KIND)
        return
    for name, overlay in by_kind.items():
        if refusal := _overlay_problem(name, overlay):
            refuse(errors, file, refusal, _BY_KIND, name)
        elif name == kind:
            yield file.part(_BY_KIND, name)


def _over(below: Document, above: Document, *, drops_idly: bool = False) -> Document:
    """One layer over another: mappings merge key by key, any other value replaces what is below it.

    A null drops a variant or a factor; with ``drops_idly`` also one that is not there.
    """
    values = merged(below.values, above.values)
    for section in ("variants", "sweep"):
        for key, value in above.mapping(section).items():
            if value is None and (drops_idly or key in below.mapping(section)):
                values = left_out(values, (section, key))
    locations = {**below.locations, **above.locations}
    return Document(values, {path: each for path, each in locations.items() if follow(values, path)[1] == path})


def _with_models(tree: Document, substitutes: Mapping[str, Any]) -> Document:
    """The profile with every model replaced that has a substitute."""
    values = {"model": DEFAULT_MODEL, **tree.values}
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
