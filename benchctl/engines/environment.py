"""Environments of engines: each engine has a Python environment that shares nothing with benchctl's.

``PythonServer`` is the base of engines that have one. Searched in this order: the interpreter that the profile
names, the environment that ``benchctl engines install`` makes (``$BENCHCTL_ENGINES_DIR/<kind>``, by default in the
user's cache directory), benchctl's own environment.

An environment is created, filled by pip as the engine's recipe says, checked, and stamped with its content. As long
as the stamp says what is wanted, a second installation does nothing.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
from platformdirs import user_cache_path

from benchctl.engines.engine import Device, Engine, Installation, Recipe, engine_for, own_options
from benchctl.engines.hub import checkpoint_for, context_of
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.profile.choices import PythonOptions, ServerOptions
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.model import VariantSettings
from benchctl.records.record import PreparedRequest
from benchctl.untrusted.files import DECODING_ERRORS

CUDA: Final = "cuda"
"""Name under which the CUDA version that torch was built for stands among the packages of a build."""
_BUILD_PACKAGES: Final = (
    "torch", "triton", "pytorch-triton", "flashinfer-python", "flashinfer-jit-cache", "flash-attn", "xformers",
    "sgl-kernel", "sglang-kernel", "transformers", "tokenizers", "xgrammar", "llguidance", "outlines_core",
    "numba", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12",
    "nvidia-cublas",
)  # fmt: skip
"""Packages that compute, schedule or decode inside servers, whatever their kind."""
_ASK: Final = """
import importlib.metadata as metadata, importlib.util as util, json, re, sys
versions, directories, cuda = {}, {}, None
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        continue
    module = util.find_spec(name)
    if module is not None and module.submodule_search_locations:
        directories[name] = module.submodule_search_locations[0]
if "torch" in versions:
    try:
        text = metadata.distribution("torch").locate_file("torch/version.py").read_text()
        match = re.search(r"^cuda\\b[^=]*= *'([^']*)'", text, re.MULTILINE)
        cuda = match[1] if match else None
    except OSError:
        pass
print(json.dumps({"versions": versions, "directories": directories, "cuda": cuda}))
"""
"""Reads what is installed and imports none of it: importing torch takes seconds."""


class _Packages(msgspec.Struct, frozen=True):
    """The packages that an environment has of those asked for; nothing of a broken interpreter."""

    versions: dict[str, str] = {}
    directories: dict[str, str] = {}
    cuda: str | None = None
    """The version that torch was built for."""


class PythonServer(Engine):
    """The base of engines that are Python programs."""

    environment: str
    """The environment that ``benchctl engines install`` makes for it."""
    distributions: tuple[str, ...]
    """Names of packages that contain it."""
    needed_packages: tuple[str, ...] = ("torch",)

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when the engine is not installed, or cannot load the model."""
        self.interpreter(settings)
        checkpoint_for(settings.model, self.kind)

    def check_requests(self, requests: Iterable[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError also where prompt and output of a request exceed the server's context."""
        super().check_requests(requests, settings)
        limit = getattr(settings.server, "max_model_len", None) or context_of(settings.model)
        longest = max((request.prompt_tokens + request.max_tokens for request in requests), default=0)
        if limit is not None and longest > limit:
            raise self.refusal(
                settings,
                f"has a context of {limit} tokens for prompt and output together, and a request needs {longest}",
                "lower workload.output_len, choose shorter prompts, or raise max_model_len where it is set",
            )

    def interpreter(self, settings: VariantSettings) -> Path:
        """The interpreter of the environment that has the engine."""
        return self.find_interpreter(own_options(settings, PythonOptions).python)

    def find_interpreter(self, named: str | None) -> Path:
        """The named interpreter, or that of the installed environment; EngineUnavailableError without one."""
        return interpreter_for(self.environment, named, self.distributions)

    def build(self, settings: VariantSettings) -> Mapping[str, str]:
        """The versions in the environment that has the engine."""
        return build_versions(self.interpreter(settings), self.distributions)

    def has_steps(self, settings: VariantSettings) -> bool:
        """True for servers of ours that log steps: of one replica, as those of several overlap and have no common
        time per step, and where requests are batched.
        """
        options = settings.server
        is_one_series = getattr(options, "data_parallel_size", 1) == 1
        is_batched = getattr(options, "continuous_batching", True)
        return bool(is_one_series and is_batched and getattr(options, "step_log", False))

    def installation(self, options: ServerOptions | None) -> Installation:
        """The environment that has the engine, with the versions in it."""
        python = self.find_interpreter(options.python if isinstance(options, PythonOptions) else None)
        versions = installed_versions(python, (*self.distributions, *self.needed_packages))
        return Installation(
            program=python,
            version=next((versions[name] for name in self.distributions if name in versions), None),
            torch=versions.get("torch"),
            missing_packages=tuple(name for name in self.needed_packages if name not in versions),
        )


def engines_directory() -> Path:
    """The directory of the environments that ``benchctl engines install`` makes, one for each kind."""
    named = os.environ.get("BENCHCTL_ENGINES_DIR")
    return Path(named).expanduser() if named else user_cache_path("benchctl") / "engines"


def interpreter_for(kind: str, named: str | None, distributions: Sequence[str]) -> Path:
    """The interpreter of the environment that has one of ``distributions``, the engine's package names.

    Raises EngineUnavailableError that says how to install it.
    """
    names = tuple(distributions)
    if named is not None:
        python = Path(named).expanduser()
        if problem := interpreter_problem(python, names, "install it there"):
            raise EngineUnavailableError(f"engine {kind!r}: engine.python is {named!r}, which {problem}")
        return python
    own = engines_directory() / kind
    for python in (own / "bin" / "python", Path(sys.executable)):
        if os.access(python, os.X_OK) and installed_versions(python, names):
            return python
    raise EngineUnavailableError(
        f"engine {kind!r} is not installed: neither {own} nor benchctl's own environment has {' or '.join(names)}; "
        f"run 'benchctl engines install {kind}', or name the interpreter of an environment that has it: "
        "--set engine.python=/path/to/venv/bin/python"
    )


def interpreter_problem(python: Path, distributions: tuple[str, ...], remedy: str) -> str | None:
    """The reason why an interpreter cannot serve what needs one of ``distributions``; None where it can."""
    if python.is_dir() or not os.access(python, os.X_OK):
        return "cannot be executed; name an interpreter, such as /path/to/venv/bin/python"
    if not installed_versions(python, distributions):
        return f"has no {' or '.join(distributions)}; {remedy}, or name another interpreter"
    return None


@cache
def installed_versions(python: Path, distributions: tuple[str, ...]) -> dict[str, str]:
    """Versions of those of ``distributions`` that an environment has, by name; empty for a broken interpreter."""
    return _ask(python, distributions).versions


@cache
def build_versions(python: Path, distributions: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions in the environment of an interpreter: of ``distributions``, of other packages that can change a
    number, and ``cuda`` as torch was built for it. Empty where the interpreter cannot say.
    """
    packages = _ask(python, (*distributions, *_BUILD_PACKAGES))
    own = {} if packages.cuda is None else {CUDA: packages.cuda}
    return dict(sorted({**packages.versions, **own}.items()))


@cache
def package_directory(python: Path, name: str) -> Path | None:
    """The directory of a package in an environment; None where it has none."""
    directory = _ask(python, (name,)).directories.get(name)
    return None if directory is None else Path(directory)


def _ask(python: Path, names: Sequence[str]) -> _Packages:
    """Ask the environment of an interpreter for packages; it is asked without the modules of ours."""
    try:
        answer = subprocess.run(
            (str(python), "-c", _ASK, *names),
            capture_output=True,
            check=True,
            timeout=60.0,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        return msgspec.json.decode(answer.stdout, type=_Packages)
    except (OSError, subprocess.SubprocessError):
        return _Packages()
    except DECODING_ERRORS:
        return _Packages()


_DEVICES: Final[dict[str, Device]] = {"cpu": "cpu", "cuda": "cuda"}
DEVICE_VARIABLE: Final = "BENCHCTL_ENGINES_DEVICE"
INSTALLABLE: Final = tuple(
    kind for kind, spec in ENGINES.items() if spec.installed_by == f"benchctl engines install {kind}"
)
"""Engines with a recipe, the preferred first. Others may run in the environment of one of them."""


def device_here(named: str | None = None) -> Device:
    """The named kind of device, else that of $BENCHCTL_ENGINES_DEVICE, else the one that this machine has.

    Raises UsageError for a name that is neither cpu nor cuda.
    """
    device = named or os.environ.get(DEVICE_VARIABLE)
    if device:
        if device not in _DEVICES:
            source = "--device" if named else DEVICE_VARIABLE
            raise UsageError(f"{source} is {device!r}; write cpu or cuda, or leave it out")
        return _DEVICES[device]
    program = shutil.which("nvidia-smi")
    has_gpu = (
        program is not None and not subprocess.run((program, "-L"), capture_output=True, check=False).returncode
    )
    return "cuda" if has_gpu else "cpu"


def recipe_for(kind: str, device: Device) -> Recipe:
    """The recipe of an engine. Raises UsageError for an engine without one, EngineUnavailableError for a device
    on which it cannot be installed.
    """
    recipe = engine_for(kind).recipe(device) if kind in ENGINES else None
    if recipe is None:
        by_hand = ENGINES[kind].installed_by if kind in ENGINES else None
        remedy = f"install it by hand: {by_hand}" if by_hand else f"choose one of {', '.join(INSTALLABLE)}"
        raise UsageError(f"no recipe installs {kind!r}; {remedy}")
    return recipe


def install_engine(
    recipe: Recipe,
    announce: Callable[[str], None],
    *,
    python: Path | None = None,
    is_forced: bool = False,
    is_quiet: bool = False,
) -> Path:
    """Make the environment of an engine as its recipe says, unless it is there; returns its interpreter.

    ``python`` creates the environment, by default the interpreter that runs benchctl. ``announce`` takes lines for
    the user, beside which pip shows what it does, unless ``is_quiet``. Raises EngineUnavailableError where pip
    fails or what was installed does not work; their own words, on the screen, say why.
    """
    directory = engines_directory() / recipe.kind
    program, stamp = directory / "bin" / "python", directory / ".installed"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two installations of one engine wait for each other
        is_there = os.access(program, os.X_OK) and not is_forced
        if is_there and stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == recipe.content:
            announce(f"{recipe.kind}: installed in {directory} ({recipe.content})")
            return program
        if not is_there or stamp.exists():  # other versions than these: begin anew
            _create_environment(recipe.kind, directory, python or Path(sys.executable))
        if _has_packages(recipe, program):
            announce(f"{recipe.kind}: found in {directory} ({recipe.content})")
        else:
            announce(f"{recipe.kind}: installing into {directory} ({recipe.content}); {recipe.cost}")
            _pip(recipe, program, "install", "--upgrade", "pip", is_quiet=is_quiet)
            _pip(recipe, program, "install", *recipe.pins, is_quiet=is_quiet)
            if recipe.unwanted:
                _pip(recipe, program, "uninstall", "-y", *recipe.unwanted, is_quiet=is_quiet)
        if recipe.finish:
            _run(program, "-c", *recipe.finish, problem=f"{recipe.kind}: {directory} could not be completed")
        announce(f"{recipe.kind}: checking")
        _run(
            program, "-c", recipe.proof, problem=f"{recipe.kind}: what was installed into {directory} does not work"
        )
        stamp.write_text(f"{recipe.content}\n", encoding="utf-8")
    announce(f"{recipe.kind}: ready")
    return program


def _has_packages(recipe: Recipe, program: Path) -> bool:
    """True for an environment with exactly the pinned versions and without the unwanted packages."""
    versions = dict(re.sub(r"\[.*\]", "", pin).split("==") for pin in recipe.pins)
    installed_versions.cache_clear()
    installed = installed_versions(program, (*versions, *recipe.unwanted))
    installed_versions.cache_clear()
    return {name: version.partition("+")[0] for name, version in installed.items()} == versions


def _create_environment(kind: str, directory: Path, python: Path) -> None:
    problem = f"{kind}: {python} cannot create the environment {directory}; name another: --python /path/to/python"
    try:
        _run(python, "-m", "venv", "--clear", str(directory), problem=problem)
    except EngineUnavailableError:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _pip(recipe: Recipe, program: Path, command: str, *words: str, is_quiet: bool) -> None:
    quiet = ("--quiet",) if is_quiet else ()
    problem = (
        f"{recipe.kind}: pip cannot {command} {' '.join(recipe.pins)}; where an index of your own has the "
        "packages, name it in PIP_INDEX_URL"
    )
    # A question of pip's, such as that for a password, would stop an installation that nobody looks at.
    options = ("--no-input", "--disable-pip-version-check", *quiet)
    _run(program, "-m", "pip", command, *options, *words, problem=problem, env=recipe.build_env)


def _run(python: Path, *words: str, problem: str, env: Mapping[str, str] | None = None) -> None:
    """Run an interpreter without the modules of ours. Raises EngineUnavailableError(problem) where it fails."""
    environment = {**os.environ, **(env or {})}
    environment.pop("PYTHONPATH", None)
    try:
        returncode = subprocess.run((str(python), *words), env=environment, check=False).returncode
    except OSError as error:
        raise EngineUnavailableError(
            f"{python} cannot be started ({error.strerror}); name an interpreter, such as --python /usr/bin/python3"
        ) from error
    if returncode:
        raise EngineUnavailableError(f"{problem}; its words are above")
