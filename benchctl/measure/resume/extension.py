"""Blocks that are added to an experiment which lacks some: its plan grows, and its manifest says so.

The runs until then keep their names, blocks and positions. Because results may have been seen, every extension is
one more look at the data, by which all intervals are corrected (``analysis/experiment/stopping.py``).
"""

import datetime as dt
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from benchctl.errors import UsageError
from benchctl.measure.result_directory import ReopenedExperiment
from benchctl.measure.resume.pending import undone_runs
from benchctl.profile.checks import MAX_RUNS
from benchctl.profile.choices import NO_REQUESTS
from benchctl.profile.planning import extend_plan
from benchctl.records.integrity import renew_digests
from benchctl.records.record import Extension, Manifest, Plan
from benchctl.records.writers import sole_writer

_SIMULATED: Final = "simulated"
"""Code of the note in the manifest of an experiment in virtual time."""


def why_not_extended(manifest: Manifest) -> str | None:
    """The reason why no blocks can be added to an experiment; None where they can."""
    if manifest.stopping is not None:
        return (
            "its stopping rule declared the looks and the most blocks before the first run, and more would break "
            "the promise of its intervals; begin a new experiment with more --blocks"
        )
    if manifest.imported is not None:
        return "it was imported; measure a new experiment"
    if any(warning.code == _SIMULATED for warning in manifest.warnings):
        return "its runs were simulated in virtual time; simulate it again with more --blocks"
    if manifest.dataset == NO_REQUESTS:
        return "it measures forward passes, which 'benchctl micro' measures anew in seconds"
    return None


def extended_plan(reopened: ReopenedExperiment, num_blocks: int) -> Plan:
    """The plan of an experiment with blocks added until it has ``num_blocks``; nothing is written.

    Raises UsageError for fewer blocks than there are, and for an experiment that cannot grow.
    """
    results = reopened.results
    manifest, plan = results.manifest(), results.plan()
    if num_blocks == manifest.blocks:
        return plan
    if num_blocks < manifest.blocks:
        raise UsageError(
            f"{results.path} has {manifest.blocks} blocks, and --blocks {num_blocks} would be fewer; blocks "
            f"are only added: give a number above {manifest.blocks}, or leave --blocks out"
        )
    if reason := why_not_extended(manifest):
        raise UsageError(f"{results.path}: no blocks can be added: {reason}")
    if (num_runs := len(plan.runs) // manifest.blocks * num_blocks) > MAX_RUNS:
        raise UsageError(f"--blocks {num_blocks} makes {num_runs:,} runs, more than {MAX_RUNS:,}; lower it")
    return extend_plan(plan, reopened.profile, num_blocks)


def extend_experiment(reopened: ReopenedExperiment, num_blocks: int) -> Extension | None:
    """Add blocks to an experiment until it has ``num_blocks``; None where its plan has as many already.

    Raises UsageError as ``extended_plan`` does.
    """
    results = reopened.results
    with sole_writer(results.path):
        manifest, plan = results.manifest(), results.plan()
        longer = extended_plan(reopened, num_blocks)
        if num_blocks == manifest.blocks:
            return None
        extension = Extension(
            extended_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            from_blocks=manifest.blocks,
            to_blocks=num_blocks,
            num_done=len(plan.runs) - len(undone_runs(results, plan)),
            num_looks=len(manifest.extensions) + 2,
        )
        extended = msgspec.structs.replace(
            manifest, blocks=num_blocks, extensions=(*manifest.extensions, extension)
        )
        with _uninterrupted():
            results.write_plan(longer)
            results.write_manifest(extended)
            renew_digests(results)
    return extension


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals that end us wait until the files agree with each other again."""
    ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
