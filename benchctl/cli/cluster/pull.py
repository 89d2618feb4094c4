"""``benchctl pull``: a result directory of another machine, fetched, continued and verified."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchctl.cli.options.experiment import RESULTS
from benchctl.formats import megabytes

if TYPE_CHECKING:
    from benchctl.cluster.pull import Pulled

_ALTERED: Final = 4


def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="HOST:DIR",
            help="Host as for ssh, and a result directory there, finished or not: "
            "login.cluster:results/topk-sweep/latest.",
        ),
    ],
    destination: Annotated[
        Path | None,
        typer.Argument(
            metavar="DEST",
            help="Directory to fetch into; by default results/<profile>/<name>, as the other machine has it.",
            show_default=False,
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(
            "--ssh",
            metavar="COMMAND",
            help="Command in place of ssh, such as 'ssh -p 2222'; by default RSYNC_RSH or ssh.",
            show_default=False,
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option("--bwlimit", metavar="RATE", help="At most so much a second: KiB, or 2M.", show_default=False),
    ] = None,
) -> None:
    """Fetch a result directory from another machine with rsync and verify it.

    Called again, only what changed is fetched, and a transfer that was cut goes on: also of an experiment that is
    still being measured. Logs with secrets stay there. Exit code: 0 intact, 2 not reachable or not there, 4 altered
    since the measurement, 130 interrupted; what came is kept.
    """
    from benchctl.cli.output.transfer import bytes_progress
    from benchctl.cli.output.verification import print_verification
    from benchctl.cluster.pull import parse_source
    from benchctl.cluster.pull import pull as pull_directory
    from benchctl.cluster.rsync import Rsync, require_bandwidth

    remote = parse_source(source)
    chosen: list[Path] = []
    if bandwidth is not None:
        require_bandwidth(bandwidth)
    try:
        with bytes_progress(remote.name, None) as on_bytes:
            rsync = Rsync(shell=ssh, bandwidth=bandwidth, on_bytes=on_bytes)
            pulled = pull_directory(remote, destination, RESULTS, rsync, chosen.append)
    except KeyboardInterrupt:
        if chosen:
            print(f"interrupted: what came is in {chosen[0]}, and the same command goes on", file=sys.stderr)
        raise
    print(f"{pulled.path}: {megabytes(pulled.received_bytes)} fetched")
    _print_running(pulled)
    print_verification(pulled.path, pulled.verified)
    if pulled.verified.alterations:
        raise typer.Exit(_ALTERED)


def _print_running(pulled: "Pulled") -> None:
    if pulled.is_running or pulled.running:
        running = f"; running: {', '.join(pulled.running)}" if pulled.running else ""
        print(
            f"still being measured when it was fetched: {pulled.num_done} of {pulled.num_planned} runs are done"
            f"{running}; pull again for the rest"
        )
