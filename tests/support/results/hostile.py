"""A result directory whose every text tries something: control sequences, markup, formulas, half characters."""

from pathlib import Path

import msgspec
from support.results import builders

from benchctl.records.record import RequestError, RunFailure
from benchctl.records.schema import GitState, GpuInfo, ResultWarning

HOSTILE = (
    "=cmd()\x1b]0;owned\x07\x9b31m\x1b[31m\x1b[2J\x08\r\u202e\u2028<script>alert(1)</script><img src=x>"
    "[red]a[/red][link=https://evil.example]b[/link] | `c` $\\frac$ @octocat {{ 7*7 }} \x7f\nsecond\tline"
)
LONG = "x" * 1_000_000
LOG = f"\x1b]0;owned\x07\x1b[2J\x9b31m\n\x1b[31mred\x1b[0m\rover\n{LONG}\n{HOSTILE}\n".encode() + b"\xff\xed\xa0\n"
CELLS = [{"top_k": 5, "value_model": value} for value in (HOSTILE, "other")]
FACTORS = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1.3 + 0.013 * (i % 4)} for i in range(4)]


def write_hostile(path: Path) -> Path:
    """Write the directory, with one failed run and one failed request; returns its path."""
    path.mkdir(parents=True)
    results = builders.write_results(path, block_factors=FACTORS, cells=CELLS)
    manifest = results.manifest()
    warning = ResultWarning(code="client-lag", message=HOSTILE, where=HOSTILE)
    builders.edit_manifest(
        results,
        profile=HOSTILE,
        label=HOSTILE + LONG,
        dataset=HOSTILE,
        argv=("benchctl", "run", HOSTILE),
        host=msgspec.structs.replace(manifest.host, hostname=HOSTILE, cpu_model=HOSTILE, platform=HOSTILE),
        git=GitState(sha=HOSTILE, is_dirty=True),
        gpus=(GpuInfo(index=0, name=HOSTILE, uuid=HOSTILE, driver=HOSTILE, memory_bytes=1),),
        warnings=(warning,),
    )
    runs = [run.path.name for run in results.runs()]
    for run_id in runs:
        config = {"model": HOSTILE, "server.note": HOSTILE}
        builders.edit_run(results, run_id, engine_version=HOSTILE, argv=(HOSTILE,), effective_config=config)
    builders.edit_run(results, runs[0], warnings=(warning,))
    failure = RunFailure(cause=HOSTILE, message=HOSTILE + LONG, log_tail=LOG.decode(errors="replace"))
    builders.edit_run(results, runs[-1], state="failed", failure=failure)
    (results.run(runs[-1]).path / "server.log").write_bytes(LOG)
    error = RequestError(kind="server-error", message=HOSTILE + LONG)
    first = True

    def fail_one(record):  # type: ignore[no-untyped-def]
        nonlocal first
        is_first, first = first, False
        return msgspec.structs.replace(record, error=error) if is_first else record

    builders.edit_requests(results, runs[1], fail_one)
    return path
