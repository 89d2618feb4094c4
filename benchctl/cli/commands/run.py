"""``benchctl run``: measure an experiment, resume one, add blocks to one, or show its plan."""

import typer

from benchctl.cli.options import RunOptions, with_options


@with_options
def run(options: RunOptions) -> None:
    """Measure an experiment: every variant in every cell, in blocks, each run on a fresh server.

    It ends with the verdict on every arm, which does not change the exit code: 0 every run is done, 4 a run is
    suspect, 5 a run failed. The verdict is the exit code of 'benchctl compare DIR'. Example: benchctl run ci-smoke
    """
    from benchctl.cli.commands.experiment import carry_out  # help needs none of it

    raise typer.Exit(carry_out(options))
