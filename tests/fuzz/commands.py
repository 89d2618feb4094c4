"""Commands over damaged result directories: no traceback, no other exit code, nothing outside touched, no hang."""

import gc
import random
import re
import shutil
import stat
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Final

from benchctl.analysis.analyzed import analyze_directory
from fuzz.directories import CANARY, Sandbox, damage_directory
from fuzz.isolation import LIMIT_S, command_codes
from fuzz.readers import CORPUS, EXAMPLE, write_results

EXIT_CODES: Final = frozenset(range(6))
MOST_BYTES: Final = 1_000_000
"""No command says more about a small directory, whatever is in it."""
_PROFILE: Final = CORPUS / "two-arms.yaml"
_PLOTS_EACH: Final = 10
"""Every so many cases the report draws its pictures, which takes longer than all else."""
_STORED: Final = re.compile(r"with its traceback in (\S+\.txt)")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def commands_of(directory: Path, draw: random.Random) -> list[list[str]]:
    """The command lines tried on a directory, of which some vary."""
    path = str(directory)
    form = draw.choice(("vllm", "aiperf", "lenvm"))
    return [
        ["show", path, *draw.choice(([], ["--json"]))],
        ["list", str(directory.parent), *draw.choice(([], ["--json"]))],
        ["verify", path],
        ["watch", path, "--once", *draw.choice(([], ["--json"]))],
        ["compare", *draw.choice(([path], [f"{path}:baseline", f"{path}:guided"], [path, path]))],
        ["export", path, "--format", form, "-o", "exported"],
        ["run", "--resume", path, "--dry-run"],
        ["report", path],
        *([["show", path], ["verify", path]] if draw.random() < 0.2 else []),  # after the report was written
    ]


def _simulated(path: Path) -> Path:
    command_codes([["simulate", "-p", str(_PROFILE), "-o", str(path)]], path.parent, limit_s=120)
    assert (path / "digests.json").exists(), (path.parent / "0.txt").read_text()
    return path


def load_modules() -> None:
    """Import what commands import, so that each fork has it."""
    import_module("benchctl.cli.app")
    for room in ("analysis", "records", "report", "interop", "measure", "profile"):
        package = import_module(f"benchctl.{room}")
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)


class DamagedDirectories:
    """Cases with a damaged copy of a small experiment of two arms: one written, one simulated, one measured."""

    def __init__(self, root: Path, seed: int) -> None:
        self._sandbox = Sandbox(root / "sandbox")
        self._honest = (write_results(root / "written"), _simulated(root / "simulated"), EXAMPLE)
        self._seed = seed
        # Once what every fork would do again: templates are compiled, the library of charts packed, tables built.
        import_module("benchctl.report.page.page").directory_page(analyze_directory(self._honest[0]))
        gc.collect()
        gc.freeze()

    def problems(self, number: int, kept: Path) -> list[str]:
        """What goes wrong in the case of this number; the damaged directory is then kept at ``kept``."""
        draw = random.Random(f"{self._seed}:directory:{number}")
        sandbox = self._sandbox
        sandbox.emptied()
        directory = sandbox.case / "damaged"
        shutil.copytree(draw.choices(self._honest, weights=(5, 5, 1))[0], directory)
        what = damage_directory(directory, sandbox, draw)
        saved = sandbox.root / "saved"
        shutil.rmtree(saved, ignore_errors=True)
        shutil.copytree(directory, saved, symlinks=True, ignore=_specials)
        before = sandbox.surroundings()
        commands = commands_of(directory, draw)
        codes = command_codes(commands, sandbox.work, has_plots=number % _PLOTS_EACH == 0)
        found = [
            f"benchctl {' '.join(argv)} ({what}): {problem}"
            for i, (argv, code) in enumerate(zip(commands, codes, strict=False))
            for problem in _problems_of(code, sandbox.work / f"{i}.txt")
        ]
        if (after := sandbox.surroundings()) != before:
            changed = sorted({path for path in before.keys() | after.keys() if before.get(path) != after.get(path)})
            found.append(f"({what}): changed outside the directory: {', '.join(changed)}")
        if found:
            shutil.copytree(saved, kept, symlinks=True, dirs_exist_ok=True)
        return found


def _problems_of(code: int | None, output: Path) -> list[str]:
    said = output.read_bytes()
    text = said.decode("utf-8", "replace")
    if (stored := _STORED.search(text)) is not None:
        text += Path(stored[1]).read_text()
    problems = []
    if code is None:
        problems.append(f"took longer than {LIMIT_S:g} s")
    elif code not in EXIT_CODES or "Traceback (most recent call last)" in text:
        problems.append(f"exit code {code}\n{text[-4_000:]}")
    if CANARY in text:
        problems.append(f"shows a file outside\n{text[-1_000:]}")
    if len(said) > MOST_BYTES:
        problems.append(f"says {len(said)} bytes: {text[:300]}")
    if (control := _CONTROL.search(text)) is not None:
        near = text[max(0, control.start() - 100) : control.end() + 100]
        problems.append(f"passes a control character on: {near!r}")
    return problems


def _specials(folder: str, names: list[str]) -> list[str]:
    """FIFOs and sockets, which cannot be copied."""
    return [
        name for name in names if stat.S_IFMT(Path(folder, name).lstat().st_mode) in {stat.S_IFIFO, stat.S_IFSOCK}
    ]
