"""An installation without extras: its size, and that nothing of the way from a run to its verdict is missing."""

from pathlib import Path

import pytest
from support.installation import installed, run_installed, site_packages
from support.results.lenvm_results import write_directory
from support.servers.simulator import sim_server

MOST_BYTES = 425_000_000

pytestmark = pytest.mark.slow


def succeed(cwd: Path, *arguments: str) -> str:
    done = run_installed(cwd, *arguments)
    assert done.returncode == 0, f"benchctl {' '.join(arguments)}: {done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


def test_an_installation_without_extras_stays_small() -> None:
    sizes: dict[str, int] = {}
    for path in site_packages(installed()).rglob("*"):
        if path.is_file() and not path.is_symlink():
            package = path.relative_to(site_packages(installed())).parts[0]
            sizes[package] = sizes.get(package, 0) + path.stat().st_size
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:12]
    assert {"benchctl", "numpy", "scipy"} <= set(sizes)
    assert sum(sizes.values()) <= MOST_BYTES, f"{sum(sizes.values()) / 1e6:.0f} MB, largest: {largest}"


@pytest.fixture(name="measured", scope="module")
def _measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the results of a short run on the simulator."""
    cwd = tmp_path_factory.mktemp("measured")
    output = succeed(cwd, "run", "ci-smoke", "--blocks", "2")
    assert "picture: " in output
    return cwd


def test_a_run_is_shown_listed_verified_reported_and_compared(measured: Path) -> None:
    latest = "results/ci-smoke/latest"
    assert "guided" in succeed(measured, "show", latest)
    assert "ci-smoke" in succeed(measured, "list")
    assert "sha256" in succeed(measured, "verify", latest).lower()
    assert "report.html" in succeed(measured, "report", latest)
    compared = run_installed(measured, "compare", f"{latest}:baseline", f"{latest}:guided", "-o", "page.html")
    assert compared.returncode in {0, 1, 3}, compared.stderr
    assert "step_ms" in compared.stdout
    assert "<svg" in (measured / "page.html").read_text() or "<script" in (measured / "page.html").read_text()


def test_a_picture_is_drawn(measured: Path) -> None:
    latest = "results/ci-smoke/latest"
    run_installed(measured, "compare", f"{latest}:baseline", f"{latest}:guided", "-o", "x.png")
    assert (measured / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_load_is_sent_to_a_server_that_runs_already(tmp_path: Path) -> None:
    with sim_server(tmp_path / "server") as server:
        url = str(server.client.base_url)
        output = succeed(tmp_path, "load", url, "--num-prompts", "8", "--max-concurrency", "4", "--output-len", "8")
    assert "8 completed, 0 failed" in output


def test_results_of_another_project_are_imported_and_shown(tmp_path: Path) -> None:
    truth = write_directory(
        tmp_path / "Qwen2.5-7B-Instruct_vs_lvm-math-0402-a-qwen2.5-7b-instruct-b-qwen2.5-1.5b-instruct"
    )
    run_installed(tmp_path, "import", "lenvm", str(truth.path), "-o", "imported")
    assert "baseline" in succeed(tmp_path, "show", "imported")
