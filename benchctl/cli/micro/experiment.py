"""Steps that the commands of ``benchctl micro`` share: settings from options, the measurement, its outcome."""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import typer

from benchctl.cli.experiment import keeping
from benchctl.cli.output.outcome import print_tables, warn
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchctl.measure.experiment import Listener
    from benchctl.micro.experiment import MicroOutcome
    from benchctl.micro.forward_profile import PassSettings
    from benchctl.profile.model import Profile
    from benchctl.profile.sections.forward_pass import Mode

WordT = TypeVar("WordT", bound=str)
A_RUN_IS_BELOW_FLOOR: Final = 4
A_RUN_FAILED: Final = 5


def words_of(text: str, choices: Sequence[WordT], option: str) -> tuple[WordT, ...]:
    """Words of a list with commas, each once. Raises UsageError for one that is not in ``choices``."""
    chosen: dict[WordT, None] = {}
    for part in text.split(","):
        word = next((word for word in choices if word == part.strip()), None)
        if word is None:
            raise UsageError(f"{option} is {text!r}; choose of {', '.join(choices)}, separated by commas")
        chosen[word] = None
    return tuple(chosen)


def counts_of(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers of a list with commas, each once. Raises UsageError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise UsageError(f"{option} is {text!r}; write whole numbers from {least} up, separated by commas: 5,10")
    return tuple(dict.fromkeys(map(int, parts)))


def pass_settings(
    *,
    model: str,
    device: str | None,
    dtype: str | None,
    mode: str | None,
    kv_layout: str,
    python: Path | None,
    replays: int,
    blocks: int,
    seed: int,
    threads: int | None = None,
) -> "PassSettings":
    """The settings that all passes of an experiment share; those that are not named depend on the device.

    Raises UsageError for unknown names, and for graphs without a GPU.
    """
    from typing import get_args

    from benchctl.costs.hardware import hardware_or_none
    from benchctl.micro.forward_profile import PassSettings
    from benchctl.profile.sections.forward_pass import MODES, DataType, KvLayout

    gpu = _gpu_name(device)
    where = device or ("cpu" if gpu is None else "cuda:0")
    modes = words_of(mode, MODES, "--mode") if mode is not None else _modes_on(where)
    if "graph" in modes and where == "cpu":
        raise UsageError(
            "--mode is graph, and a CPU has no graphs; leave --mode out, or name a GPU with --device cuda:0"
        )
    dtypes: tuple[DataType, ...] = get_args(DataType)
    layouts: tuple[KvLayout, ...] = get_args(KvLayout)
    hardware = None if gpu is None else hardware_or_none(gpu)
    return PassSettings(
        model=model,
        device=where,
        dtype=words_of(dtype or ("float32" if where == "cpu" else "bfloat16"), dtypes, "--dtype")[0],
        modes=tuple(word for word in MODES if word in modes),
        kv_layout=words_of(kv_layout, layouts, "--kv-layout")[0],
        hardware=None if hardware is None else hardware.name,
        python=None if python is None else str(python),
        blocks=blocks,
        replays=replays,
        seed=seed,
        threads=threads or (_threads_on_cpu() if where == "cpu" else None),
    )


def _threads_on_cpu() -> int:
    """One for each core but one: threads that wait for the one whose core another program has taken spin."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)


def _modes_on(device: str) -> "tuple[Mode, ...]":
    return ("eager",) if device == "cpu" else ("eager", "graph")


def _gpu_name(device: str | None) -> str | None:
    """Name of the GPU that ``device`` names, or of the first one; None without any."""
    from benchctl.measure.telemetry.gpu import gpu_inventory

    if device == "cpu":
        return None
    number = int((device or "cuda:0").partition(":")[2] or 0) if _is_cuda(device) else 0
    gpus = gpu_inventory()
    return gpus[number].name if number < len(gpus) else None


def _is_cuda(device: str | None) -> bool:
    """Raises UsageError for a device that is neither ``cpu`` nor ``cuda:N``."""
    name, _, number = (device or "cuda:0").partition(":")
    if name != "cuda" or (number and not number.isdecimal()):
        raise UsageError(f"--device is {device!r}; write cpu, or cuda:0 for the first GPU")
    return True


def measure_micro(
    profile: "Profile", output_dir: Path, label: str | None, *, directory: Path | None, is_quiet: bool
) -> "MicroOutcome":
    """Measure an experiment of forward passes in a new directory: ``directory``, or one below ``output_dir``."""
    from benchctl.measure.result_directory import Origin
    from benchctl.micro.experiment import measure_forward
    from benchctl.profile.planning.plan import plan_runs

    argv = ("benchctl", *sys.argv[1:])
    origin = Origin(output_root=output_dir, label=label, argv=argv, directory=directory)
    paths: list[Path] = []
    with _progress(len(plan_runs(profile).runs), profile, is_quiet=is_quiet) as listener, _advice(paths):
        return measure_forward(profile, origin, listener, on_results=lambda results: _announce(results.path, paths))


def resume_micro(path: Path, *, is_quiet: bool) -> "MicroOutcome":
    """Measure the runs of an earlier experiment that are not done."""
    from benchctl.measure.result_directory import reopen_experiment
    from benchctl.measure.resume.pending import undone_runs
    from benchctl.micro.experiment import resume_forward

    reopened = reopen_experiment(path, None)
    print(f"continuing {path}", flush=True)
    pending = undone_runs(reopened.results)
    with _progress(len(pending), reopened.profile, is_quiet=is_quiet) as listener, _advice([path]):
        return resume_forward(reopened, listener)


def print_micro(outcome: "MicroOutcome") -> None:
    """Print what an experiment came to; ends the command with its exit code."""
    from benchctl.analysis.analyzed import analyze_directory
    from benchctl.report.export import write_derived

    path = shlex.quote(str(outcome.path))
    with keeping(outcome.path):
        analysis = analyze_directory(outcome.path)
        write_derived(analysis)
        print_tables(analysis)
        print(f"\ndetails: benchctl show {path}; page: {outcome.path / 'report.html'}")
    if code := warn_of_failures(outcome):
        raise typer.Exit(code)


def warn_of_failures(outcome: "MicroOutcome") -> int:
    """Warn of runs that count nowhere; returns the exit code that they mean, 0 without any."""
    counts, path = outcome.outcome, shlex.quote(str(outcome.path))
    if outcome.below_floor:
        warn(f"{len(outcome.below_floor)} runs took less time than their FLOPs and bytes allow, and count nowhere")
    if counts.num_failed > len(outcome.below_floor):
        warn(f"{counts.num_failed} runs failed; repeat them with: benchctl micro forward --resume {path}")
    if outcome.below_floor:
        return A_RUN_IS_BELOW_FLOOR
    return A_RUN_FAILED if counts.num_failed else 0


@contextmanager
def _progress(num_runs: int, profile: "Profile", *, is_quiet: bool) -> "Iterator[Listener]":
    from benchctl.cli.output.progress import experiment_progress
    from benchctl.profile.planning.plan import arms

    is_quiet = is_quiet or bool(os.environ.get("CI"))
    with experiment_progress(num_runs, len(arms(profile)), is_quiet=is_quiet) as listener:
        yield listener


@contextmanager
def _advice(paths: list[Path]) -> "Iterator[None]":
    """After an interrupt, say how to go on with the directory that is in ``paths`` by then."""
    try:
        yield
    except KeyboardInterrupt:
        for path in paths:
            again = shlex.join(["benchctl", "micro", "forward", "--resume", str(path)])
            print(f"interrupted; results until now are kept. Continue with: {again}", file=sys.stderr)
        raise


def _announce(path: Path, paths: list[Path]) -> None:
    paths.append(path)
    print(f"results in {path}", flush=True)
