"""``benchctl noise neighbours``: the mutual disturbance of blocks that run at the same time on this host."""

import sys
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.cli.options.options import (
    RESULTS,
    Blocks,
    Destination,
    EnginePreset,
    Label,
    Output,
    OutputDir,
    Overrides,
    ProfileArgument,
    ProfileName,
    Quiet,
    Seed,
    chosen_profile,
)
from benchctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchctl.cli.commands.noise import CheckOutcome
    from benchctl.cluster.slots import Slot
    from benchctl.profile.model import Profile

_Parallel = Annotated[
    int | None,
    typer.Option("--parallel", min=1, metavar="N", help="Blocks at a time: one is measured, N - 1 are neighbours."),
]
_Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume", metavar="DIR", help="Continue the check in DIR; with --blocks N, add blocks until there are N."
    ),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print slots, runs and an estimate; measure nothing.")]
_NoStore = Annotated[bool, typer.Option("--no-store", help="Do not store the check for later experiments.")]
_Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON document at the end: directory and check; all else goes to stderr."
    ),
]


def neighbours(  # the parameters are the command line
    name: ProfileArgument = None,
    profile: ProfileName = None,
    parallel: _Parallel = None,
    engine: EnginePreset = None,
    overrides: Overrides = None,
    blocks: Blocks = None,
    seed: Seed = None,
    resume: _Resume = None,
    output: Output = None,
    output_dir: OutputDir = RESULTS,
    label: Label = None,
    dry_run: _DryRun = False,
    no_store: _NoStore = False,
    quiet: Quiet = False,
    as_json: _Json = False,
) -> None:
    """Measure whether blocks that run at the same time on this host disturb each other.

    The baseline of the profile is measured alone and beside N - 1 neighbours that serve the same load, in balanced
    order, each run with a fresh server. Exit code 0, whatever it finds; 4 with suspect runs, 5 when a run failed.
    Example: benchctl noise neighbours topk-sweep --engine vllm --parallel 8
    """
    from benchctl.cli.screen import print_json
    from benchctl.profile.load import load_profile

    profile_name = chosen_profile(name, profile)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        if resume is not None:
            if profile_name or parallel or engine or overrides or seed is not None or output or label or dry_run:
                raise UsageError(
                    f"--resume continues {resume} as it was begun: give only --blocks, or nothing, with it"
                )
            outcome = _continue(resume, blocks, stores=not no_store, is_quiet=quiet or as_json)
        else:
            if profile_name is None or parallel is None:
                raise UsageError(
                    "name a profile and the number of blocks at a time, such as 'benchctl noise neighbours "
                    "ci-smoke --engine llamacpp --parallel 2'"
                )
            chosen = load_profile(
                profile_name, engine=engine, overrides=overrides or [], seed=seed, is_to_send=True
            )
            destination = Destination(output=output, output_dir=output_dir, label=label)
            begun = _begin(
                chosen,
                parallel,
                blocks,
                destination,
                stores=not no_store,
                is_quiet=quiet or as_json,
                is_plan=dry_run,
            )
            if begun is None:
                return
            outcome = begun
    if as_json:
        import msgspec

        check = None if outcome.check is None else msgspec.to_builtins(outcome.check)
        print_json({"directory": str(outcome.results.path), "check": check})
    _exit(outcome)


def _begin(
    profile: "Profile",
    parallel: int,
    num_blocks: int | None,
    destination: Destination,
    *,
    stores: bool,
    is_quiet: bool,
    is_plan: bool,
) -> "CheckOutcome | None":
    """Measure a new check; of a plan, print it. None where nothing was measured."""
    from benchctl.cli.commands.noise import begin_check, plan_check
    from benchctl.cli.conduct import (
        check_experiment,
        check_gpu,
        check_machine,
        measure_lengths,
        prepare_experiment,
        print_plan,
        share_kv_memory,
        tokenizer_of,
    )
    from benchctl.cluster.local.demand import check_beside
    from benchctl.cluster.neighbours.check import nothing_to_check
    from benchctl.cluster.slots import slots_of_host
    from benchctl.measure.gpu_need import gpus_of_block

    reason = nothing_to_check(profile)
    if reason is not None or parallel < 2:
        print(reason or "one block at a time has no neighbours: nothing to check")
        return None
    check_beside(profile, parallel)
    slots = slots_of_host(parallel, gpus_of_block(profile))
    check_gpu(profile, is_plan=is_plan)
    chosen = share_kv_memory(profile, is_plan=is_plan).applied_to(profile)
    planned, noise = plan_check(chosen, num_blocks)
    check_experiment(planned, is_plan=is_plan)
    if is_plan:
        print_plan(planned, prepare_experiment(planned).requests, noise)
        return None
    tokenizer = tokenizer_of(planned)
    with _held(slots, parallel) as ours:
        lengths_from = measure_lengths(
            planned, destination.output_dir, destination.label, is_quiet=is_quiet, tokenizer=tokenizer
        )
        prepared = prepare_experiment(planned, lengths_from, tokenizer=tokenizer)
        check_machine(planned, prepared.requests, destination.path)
        return begin_check(
            planned,
            prepared,
            ours,
            noise,
            directory=destination.output,
            output_dir=destination.output_dir,
            label=destination.label,
            is_quiet=is_quiet,
            stores=stores,
        )


def _continue(path: Path, num_blocks: int | None, *, stores: bool, is_quiet: bool) -> "CheckOutcome":
    """Measure what is left of a check, on the slots that it was begun on."""
    from benchctl.cli.commands.noise import continue_check
    from benchctl.cluster.neighbours.check import slots_of_check
    from benchctl.records.directory import open_results

    slots = slots_of_check(open_results(path))
    with _held(slots, len(slots)):
        return continue_check(path, num_blocks, is_quiet=is_quiet, stores=stores)


@contextmanager
def _held(slots: "Sequence[Slot]", num: int) -> "Iterator[tuple[Slot, ...]]":
    """``num`` of the slots, which no other benchctl has; prints them."""
    from benchctl.cluster.local.demand import slot_text
    from benchctl.cluster.local.held_slots import held_slots

    with held_slots(slots, num, is_virtual=False) as held:
        first, *others = (each.slot for each in held)
        texts = " and ".join(slot_text(slot) for slot in others)
        print(f"measured on {slot_text(first)}; neighbours on {texts}", flush=True)
        yield (first, *others)


def _exit(outcome: "CheckOutcome") -> None:
    from benchctl.cli.conduct import A_RUN_FAILED, A_RUN_IS_SUSPECT

    counts = outcome.outcome
    code = A_RUN_FAILED if counts.num_failed else A_RUN_IS_SUSPECT if counts.num_suspect else 0
    if code:
        raise typer.Exit(code)
