"""Random damage to a whole result directory, and the surroundings that nobody may touch or read."""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fuzz.mutations import TEXTS, hostile_value, kind_of, mutated

CANARY: Final = "canary-of-a-file-outside"
"""The content of every file outside: it may appear in no output."""


class Sandbox:
    """``case`` holds the damaged directory, commands run in ``work``; ``outside`` and ``home`` belong to others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.outside, self.home, self.work, self.case = (
            root / name for name in ("outside", "home", "work", "case")
        )
        for path in (self.outside / "folder", self.home, self.work, self.case):
            path.mkdir(parents=True)
        for path in (self.outside / "file.txt", self.outside / "folder" / "run.json"):
            path.write_text(f'{{"{CANARY}": 1}}\n')

    def emptied(self) -> None:
        """Remove what a case and its commands left."""
        for path in (self.case, self.work):
            shutil.rmtree(path)
            path.mkdir()

    def surroundings(self) -> dict[str, tuple[int, ...]]:
        """Kind, size and time of change of everything that no command may alter, by path."""
        paths = (path for base in (self.outside, self.home) for path in (base, *base.rglob("*")))
        stats = {str(path): path.lstat() for path in paths}
        return {path: (stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats.items()}


def damage_directory(directory: Path, sandbox: Sandbox, draw: random.Random) -> str:
    """Damage one to three entries of a result directory in place; says what was done."""
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        entries = sorted(path for path in directory.rglob("*") if not path.is_symlink())
        files = [path for path in entries if path.is_file()]
        if not files:
            break
        way = draw.choices(tuple(_WAYS), weights=tuple(weight for weight, _ in _WAYS.values()))[0]
        place = draw.choice(files if way in {"content", "names"} else entries)
        _WAYS[way][1](place, sandbox, draw)
        done.append(f"{way} {place.relative_to(directory)}")
    return ", ".join(done)


def _content(path: Path, _: Sandbox, draw: random.Random) -> None:
    if path.is_file():
        path.write_bytes(mutated(path.read_bytes(), kind_of(path.name), draw))


def _removed(path: Path, _: Sandbox, __: random.Random) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _link(path: Path, sandbox: Sandbox, draw: random.Random) -> None:
    targets = (
        sandbox.outside / "file.txt",
        sandbox.outside / "folder",
        sandbox.outside / "new",
        path,
        Path("../.."),
        Path("/dev/zero"),
        Path("/etc/passwd"),
        path.with_name("run.json"),
        Path("/proc/self/mem"),
    )
    _removed(path, sandbox, draw)
    path.symlink_to(draw.choice(targets))


def _special(path: Path, sandbox: Sandbox, draw: random.Random) -> None:
    _removed(path, sandbox, draw)
    match draw.randrange(3):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
            (path / "file").write_text("x")
        case _:
            here = Path.cwd()
            with socket.socket(socket.AF_UNIX) as server:
                os.chdir(path.parent)  # addresses are short
                server.bind(path.name)
                os.chdir(here)


def _names(path: Path, sandbox: Sandbox, draw: random.Random) -> None:
    """Names of runs, files and profiles in a document that lead out of the directory."""
    if path.suffix != ".json":
        _content(path, sandbox, draw)
        return
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return
    for holder in _objects(document):
        for key in ("run_id", "profile", "path", "variant", "baseline", "label", "state", "files"):
            if key in holder and draw.random() < 0.4:
                names = (
                    "../../outside/folder",
                    str(sandbox.outside / "folder"),
                    "..",
                    ".",
                    "",
                    "a/b",
                    "a\x00b",
                    *TEXTS[:20],
                )
                holder[key] = draw.choice(names) if draw.random() < 0.8 else hostile_value(draw)
    path.write_text(json.dumps(document))


def _objects(node: object) -> list[dict[str, object]]:
    if isinstance(node, dict):
        return [node, *(found for part in node.values() for found in _objects(part))]
    return [found for part in node for found in _objects(part)] if isinstance(node, list) else []


def _added(path: Path, sandbox: Sandbox, draw: random.Random) -> None:
    folder = path if path.is_dir() else path.parent
    name = draw.choice(
        (
            "report.html",
            "plots",
            "summary.csv",
            "result.json",
            "digests.json",
            "steps.jsonl",
            "noise.json",
            ".lock",
            "journal.jsonl",
            "x\x1b[31m",
            "é" * 60,
            "-rf",
            "peaks.json",
            "manifest.json",
        )
    )
    target = folder / name
    if not target.exists() and not target.is_symlink():
        target.write_bytes(draw.choice((b"", b"{}", b"[]", b"\xff", b"null", b"x" * 1000)))
        if draw.random() < 0.6:
            _link(target, sandbox, draw)


def _moved(path: Path, _: Sandbox, draw: random.Random) -> None:
    target = path.with_name(draw.choice((f"{path.name}.bak", "run.json", "steps.jsonl", "plan.json", "x")))
    if not target.exists() and not target.is_symlink():
        path.rename(target)


def _long(path: Path, sandbox: Sandbox, draw: random.Random) -> None:
    """So many lines that the file is read in another way."""
    if path.suffix != ".jsonl":
        _content(path, sandbox, draw)
        return
    content = path.read_bytes() * 200
    at = draw.randrange(len(content) + 1) if content else 0
    path.write_bytes(mutated(content, "bytes", draw) if draw.random() < 0.5 else content[:at])


_WAYS: Final[dict[str, tuple[int, Callable[[Path, Sandbox, random.Random], None]]]] = {
    "content": (10, _content),
    "names": (4, _names),
    "removed": (2, _removed),
    "link": (3, _link),
    "special": (2, _special),
    "added": (2, _added),
    "moved": (1, _moved),
    "long": (2, _long),
}
