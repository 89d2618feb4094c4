"""``benchctl micro``: forward passes of a model with random weights, without a server."""

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Measure single forward passes, and the peaks of a device, with torch and without a server.",
)
