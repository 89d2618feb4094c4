"""Checks of neighbours with real servers on a real clock: planted disturbances are found, absent ones not claimed.

The servers are those of ``support/servers/programs/busy_server.py``: they compute, so that one on the same core
makes another slower, or they sleep, so that none disturbs any.
"""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import benchctl
from support.servers.busy_engine import busy_profile
from support.servers.real_engines import turn_of
from support.servers.stubborn_engine import processes_of, wait_until

from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning.noise_floor import engine_sha256
from benchctl.cli.commands.noise import CheckOutcome, begin_check, continue_check, note_neighbours, plan_check
from benchctl.cli.conduct import create, prepare_experiment
from benchctl.cluster.neighbours.check import conclude_check
from benchctl.cluster.neighbours.on_file import check_command
from benchctl.cluster.slots import Slot
from benchctl.errors import NotComparableError
from benchctl.measure.noise_on_file import sound_noise
from benchctl.measure.telemetry.gpu import gpu_inventory
from benchctl.profile.load import load_profile
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.stores.noise_store import store_noise
from benchctl.records.stores.peaks_store import MetricNoise, NoiseFloor
from benchctl.records.stores.stores import NeighbourCheck, load_neighbours

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a neighbour needs a core of its own"),
]
CORES = tuple(sorted(os.sched_getaffinity(0)))[:2]
SHARING = (Slot(index=0, cores=CORES), Slot(index=1, cores=CORES[:1]))
"""Both servers compute on the first core; the client of the measured one has the second."""
APART = (Slot(index=0, cores=CORES[:1]), Slot(index=1, cores=CORES[1:2]))


def busy(directory: Path, **variables: object) -> Profile:
    return load_profile(str(busy_profile(directory, **variables)), is_to_send=True)


def check(directory: Path, profile: Profile, slots: tuple[Slot, ...], num_blocks: int) -> CheckOutcome:
    planned, noise = plan_check(profile, num_blocks)
    prepared = prepare_experiment(planned)
    return begin_check(planned, prepared, slots, noise, output_dir=directory / "results", is_quiet=True)


@pytest.fixture(autouse=True)
def _others_wait() -> Iterator[None]:
    """Tests of this file in other processes, which would be neighbours of these, too."""
    with turn_of("neighbours", is_alone=True):
        yield


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile, CheckOutcome]:
    """A check whose neighbours compute on the core of the measured server."""
    directory = tmp_path_factory.mktemp("planted")
    profile = busy(directory, BUSY_WORK=1)
    with turn_of("neighbours", is_alone=True):
        return directory, profile, check(directory, profile, SHARING, 8)


def result(outcome: CheckOutcome) -> NeighbourCheck:
    assert outcome.check is not None
    return outcome.check


def test_a_neighbour_that_burns_the_same_core_is_found(planted: tuple[Path, Profile, CheckOutcome]) -> None:
    _, _, outcome = planted
    effect = result(outcome).metrics["wall_s"]
    assert effect.finding == "disturbed"
    assert effect.ratio > 1.3
    assert result(outcome).readings["server_cpu_cores"].beside < result(outcome).readings["server_cpu_cores"].alone


def test_what_a_check_found_is_in_its_directory_and_its_warnings(
    planted: tuple[Path, Profile, CheckOutcome],
) -> None:
    path = planted[2].results.path
    assert load_neighbours(path) == result(planted[2])
    codes = [warning.code for warning in ResultDirectory(path).manifest().warnings]
    assert "neighbour-check" in codes
    assert "neighbours-disturb" in codes
    shown = benchctl("show", path).stdout
    assert "blocks that run at the same time disturb each other: wall_s" in shown
    assert "less processor time" in shown
    compared = benchctl("compare", f"{path}:alone", f"{path}:beside")
    assert compared.returncode == 1
    assert "disturb each other: wall_s" in compared.stdout
    assert benchctl("report", path).returncode == 0
    assert "disturb each other" in (path / "report.html").read_text()


def test_the_check_is_on_file_and_later_experiments_carry_it(
    planted: tuple[Path, Profile, CheckOutcome],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, profile, outcome = planted
    assert "busy-neighbours" in benchctl("noise", "list").stdout
    results = create(profile, prepare_experiment(profile), tmp_path, None)
    note_neighbours(results, profile, (), SHARING, checks=False, is_quiet=True)
    assert load_neighbours(results.path) == result(outcome)
    (warning,) = (w for w in results.manifest().warnings if w.code.startswith("neighbours-"))
    assert warning.code == "neighbours-disturb"
    assert warning.message in capsys.readouterr().err
    note_neighbours(results, profile, (), APART[:1], checks=True, is_quiet=True)
    assert "nothing to check" in capsys.readouterr().out


def test_without_a_check_on_file_an_experiment_says_so_with_the_command(
    planted: tuple[Path, Profile, CheckOutcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = planted[1]
    results = create(profile, prepare_experiment(profile), tmp_path, None)
    three = (*SHARING, Slot(index=2, cores=CORES[1:]))
    note_neighbours(results, profile, (), three, checks=False, is_quiet=True)
    (warning,) = (w for w in results.manifest().warnings if w.code.startswith("neighbours-"))
    assert warning.code == "neighbours-unchecked"
    assert warning.message.endswith("profile.yaml --parallel 3")
    assert warning.message in capsys.readouterr().err
    assert load_neighbours(results.path) is None


def test_a_check_is_neither_the_noise_of_the_machine_nor_continued_without_neighbours(
    planted: tuple[Path, Profile, CheckOutcome],
) -> None:
    path = planted[2].results.path
    with pytest.raises(NotComparableError, match="is a check of neighbours"):
        sound_noise(load_experiment(path))
    refused = benchctl("run", "--resume", path)
    assert refused.returncode == 2
    assert f"benchctl noise neighbours --resume {path}" in refused.stderr


def test_a_lost_run_is_measured_again_and_blocks_are_added(planted: tuple[Path, Profile, CheckOutcome]) -> None:
    _, _, outcome = planted
    path = outcome.results.path
    before = result(outcome)
    num_done = sum(run.read().state == "done" for run in outcome.results.runs())
    again = continue_check(path, 9, is_quiet=True, stores=False)
    assert again.outcome.num_skipped == num_done
    assert again.outcome.num_done + again.outcome.num_suspect == 18 - num_done
    assert result(again).metrics["wall_s"].num_blocks >= before.metrics["wall_s"].num_blocks
    assert result(again).confidence > before.confidence


def test_a_neighbour_on_another_core_that_sleeps_is_not_claimed(tmp_path: Path) -> None:
    busy(tmp_path)
    options = ("--parallel", "2", "--blocks", "6", "--output", tmp_path / "check", "--json")
    done = benchctl("noise", "neighbours", tmp_path / "busy.yaml", *options, cwd=tmp_path)
    assert done.returncode in {0, 4}, done.stderr
    document = json.loads(done.stdout)["check"]
    if document is not None:  # on a machine that is too busy for the client nothing can be said
        assert "disturbed" not in [effect["finding"] for effect in document["metrics"].values()]
        assert not document.get("loses_runs")
    assert processes_of(str(tmp_path)) == []


def test_an_experiment_checks_its_neighbours_first_and_carries_the_result(tmp_path: Path) -> None:
    profile, store = busy(tmp_path), tmp_path / "noise"
    metric = MetricNoise(log_sd=0.002, num_blocks=8, floor_frac=0.004)
    noise = NoiseFloor(
        schema_version=3,
        measured_at="2026-11-23T10:00:00Z",
        source="aa",
        host=platform.node(),
        gpus=tuple(gpu.name for gpu in gpu_inventory()),
        engine="vllm",
        engine_sha256=engine_sha256(profile),
        model=profile.model,
        request_set_sha256="1" * 64,
        metrics={"wall_s": metric},
    )
    store_noise(store, noise)
    options = (
        "--on",
        "local",
        "--parallel",
        "2",
        "--check-neighbours",
        "--blocks",
        "2",
        "--output",
        "r",
        "--quiet",
    )
    done = benchctl(
        "run", tmp_path / "busy.yaml", *options, cwd=tmp_path, timeout_s=300, BENCHCTL_NOISE_DIR=str(store)
    )
    assert done.returncode in {0, 4}, done.stderr
    assert (
        "6 blocks, alone and beside neighbours in each: at a scatter of 0.2% between blocks (measured)"
        in done.stdout
    )
    measured = load_neighbours(tmp_path / "r" / "neighbours")
    assert measured is not None
    runs = ResultDirectory(tmp_path / "r" / "neighbours").runs()
    assert {run.read().state for run in runs} <= {"done", "suspect"}
    assert load_neighbours(tmp_path / "r") == (measured if measured.is_done else None)
    codes = {warning.code for warning in ResultDirectory(tmp_path / "r").manifest().warnings}
    assert ("neighbours-unchecked" in codes) == (not measured.is_done)
    assert processes_of(str(tmp_path)) == []


def test_a_run_that_loses_its_neighbour_does_not_count(tmp_path: Path) -> None:
    profile = busy(tmp_path, BUSY_DIES_AFTER=60, BUSY_ONLY_ON_CORE=CORES[1])
    outcome = check(tmp_path, profile, APART, 1)
    assert outcome.check is None
    (beside,) = (run.read() for run in outcome.results.runs() if run.read().variant == "beside")
    assert beside.state == "suspect"
    (lost,) = (warning for warning in beside.warnings if warning.code == "neighbours-lost")
    assert "slot 1 ended" in lost.message
    assert "slot-1.log" in lost.message
    with pytest.raises(NotComparableError, match="lacked a neighbour"):
        conclude_check(outcome.results)
    shown = benchctl("noise", "show", outcome.results.path)
    assert shown.returncode == 2
    assert "without a result yet" in shown.stderr


def test_a_neighbour_that_never_loads_is_a_failed_run_and_the_rest_is_measured(tmp_path: Path) -> None:
    profile = busy(tmp_path, BUSY_DIES_AFTER=1, BUSY_ONLY_ON_CORE=CORES[1])
    outcome = check(tmp_path, profile, APART, 1)
    records = {run.read().variant: run.read() for run in outcome.results.runs()}
    assert (records["alone"].state, records["beside"].state) == ("done", "failed")
    failure = records["beside"].failure
    assert failure is not None
    assert failure.cause == "neighbours-lost"
    assert "the neighbour on slot 1 ended" in failure.message


@pytest.mark.parametrize(
    "ending",
    [*(pytest.param(each, marks=pytest.mark.nightly) for each in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
)
def test_whatever_ends_a_check_no_neighbour_is_left(tmp_path: Path, ending: signal.Signals) -> None:
    busy_profile(tmp_path, BUSY_MS=20)
    output = tmp_path / "check"
    argv = (sys.executable, "-m", "benchctl", "noise", "neighbours", str(tmp_path / "busy.yaml"), "--parallel", "2")
    started = subprocess.Popen((*argv, "--blocks", "2", "--output", str(output)), cwd=tmp_path)
    try:
        measured = output / "runs" / "001-b0-beside" / "requests.jsonl"
        beside = output / "runs" / "000-b0-beside" / "requests.jsonl"
        wait_until("a request beside a neighbour", lambda: measured.exists() or beside.exists(), 60.0)
        started.send_signal(ending)
        assert started.wait(30) in {130, -ending}
        wait_until("the end of the neighbours", lambda: not processes_of(str(tmp_path)), 30.0)
    finally:
        started.kill()
        started.wait()


def test_there_is_nothing_to_check_in_virtual_time(tmp_path: Path) -> None:
    done = benchctl("noise", "neighbours", "ci-smoke", "--parallel", "4", cwd=tmp_path)
    assert done.returncode == 0
    assert "steps in virtual time, which no neighbour changes: nothing to check" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_servers_of_others_have_no_neighbours_of_ours(tmp_path: Path) -> None:
    options = ("--engine", "attach", "--set", "engine.options.url=http://127.0.0.1:9")
    done = benchctl("noise", "neighbours", "ci-smoke", "--parallel", "2", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert "no neighbours can be put beside it" in done.stderr


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (
            "run topk-sweep --engine vllm --set model=m --on local --parallel 4 --blocks 8 --quiet --output r",
            "topk-sweep --engine vllm --set model=m --parallel 4",
        ),
        ("run --quick -p aa --engine=vllm --on local --parallel=4", "-p aa --engine=vllm --parallel 4"),
        ("run --resume r --on local --parallel 4 --engine vllm", "r/profile.yaml --parallel 4"),
    ],
)
def test_the_command_that_checks_says_what_is_measured_and_nothing_else(argv: str, command: str) -> None:
    results = ResultDirectory(Path("r"))
    assert check_command(results, 4, argv.split()) == f"benchctl noise neighbours {command}"
