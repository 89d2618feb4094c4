"""Experiments in their middle: directories, records and owners of blocks as processes of a cluster leave them."""

import datetime as dt
from pathlib import Path

import msgspec

from benchctl.cluster.blocks import block_runs
from benchctl.profile.load import dump_profile, load_profile
from benchctl.profile.planning import plan_runs
from benchctl.records.directory import OWNER_FILE, ResultDirectory
from benchctl.records.files import encode
from benchctl.records.record import Manifest, PlannedRun, RunFailure, RunRecord, RunTimes
from benchctl.records.schema import SCHEMA_VERSION, HostInfo, NodeGpu, NodeInfo, ResultWarning
from benchctl.records.writers import Owner

ARM_S = {None: 61.0, 1: 64.0, 2: 66.0, 3: 70.0, 4: 75.0, 5: 83.0}
"""Seconds of a run of each arm, by its top_k."""


def plant_shared(path: Path, num_blocks: int) -> ResultDirectory:
    """A divided experiment of six arms of which no block was begun."""
    profile = load_profile("ci-smoke", engine="sim", overrides=["sweep.top_k=[1,2,3,4,5]"], blocks=num_blocks)
    results = ResultDirectory(path)
    (path / "blocks").mkdir(parents=True)
    results.write_plan(plan_runs(profile))
    results.write_profile(dump_profile(profile))
    results.write_prepared_requests(b"")
    results.write_manifest(
        Manifest(
            schema_version=SCHEMA_VERSION,
            state="planned",
            profile=profile.name,
            profile_sha256="0" * 64,
            request_set_sha256="0" * 64,
            dataset="generated",
            seed=profile.seed,
            blocks=num_blocks,
            baseline=profile.baseline,
            stop="forced",
            engine="sim",
            created_at="2026-01-02T03:04:05Z",
            argv=("benchctl",),
            benchctl_version="0",
            host=HostInfo(hostname="login", platform="Linux", python="3.12"),
        )
    )
    return results


def plant_block(
    results: ResultDirectory,
    block: int,
    *,
    num_ended: int,
    is_running: bool = False,
    is_held: bool = False,
    node: str = "n01",
    failure: RunFailure | None = None,
    warning: ResultWarning | None = None,
    elapsed_s: float = 20.0,
) -> None:
    """Write the owner of a block, the record of its current run, which began ``elapsed_s`` ago, and those of its
    ended ones.

    The last that ended is failed with ``failure``, suspect with ``warning``.
    """
    runs, of_block = block_runs(results, block), results.block(block)
    of_block.write_manifest(msgspec.structs.replace(results.manifest(), blocks=1))
    began = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=600)
    for number, planned in enumerate(runs[:num_ended]):
        is_last = number == num_ended - 1
        state = "failed" if failure and is_last else "suspect" if warning and is_last else "done"
        record = _record(planned, number, node, began)
        changes = {"failure": failure, "warnings": (warning,) if warning else ()} if is_last else {}
        _write(results, msgspec.structs.replace(record, state=state, **changes))
    if is_running:
        planned = runs[num_ended]
        begins = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=elapsed_s + block % 20)
        record = _record(planned, num_ended, node, begins)
        times = msgspec.structs.replace(record.times, stop_ns=None)
        _write(results, msgspec.structs.replace(record, state="running", times=times))
    write_owner(results, block, node, began, has_ended=not (is_held or is_running))


def write_owner(results: ResultDirectory, block: int, node: str, began: dt.datetime, *, has_ended: bool) -> None:
    """Put a process of another host on record as the owner of a block."""
    owner = Owner(
        schema_version=SCHEMA_VERSION,
        node=node,
        boot_id=f"boot of {node}",
        pid=4711,
        job=f"slurm 17_{block}",
        begun_at=_text(began),
        has_ended=has_ended,
    )
    (results.block(block).path / OWNER_FILE).write_bytes(encode(owner))


def _record(planned: PlannedRun, number: int, node: str, began: dt.datetime) -> RunRecord:
    launch_s = 100.0 + number * 100
    duration_s = ARM_S[planned.cell.get("top_k")] * (1 + 0.01 * (planned.block % 7 - 3))
    return RunRecord(
        schema_version=SCHEMA_VERSION,
        **msgspec.structs.asdict(planned),
        attempt=1,
        engine="sim",
        host=node,
        node=NodeInfo(name=node, hostname=node, gpus=(NodeGpu(index=0, name="GPU", uuid=f"GPU-{node}"),)),
        started_at=_text(began),
        times=RunTimes(
            launch_ns=int(launch_s * 1e9),
            ready_ns=int((launch_s + 10) * 1e9),
            stop_ns=int((launch_s + duration_s) * 1e9),
        ),
    )


def _write(results: ResultDirectory, record: RunRecord) -> None:
    results.run(record.run_id).write(record)


def _text(moment: dt.datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
