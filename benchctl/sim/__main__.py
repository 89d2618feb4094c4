"""``python -m benchctl.sim``: start the simulated server."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from pydantic import ValidationError

from benchctl.costs.hardware import device_or_none
from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.http.server import Server, open_step_log

log = logging.getLogger("benchctl.sim")


def parser() -> argparse.ArgumentParser:
    """The flags: address, step log, and the file of all other settings."""
    flags = argparse.ArgumentParser(prog="python -m benchctl.sim", description=__doc__, allow_abbrev=False)
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--step-log", type=Path, help="JSON Lines file for the step records; overwritten")
    flags.add_argument(
        "--config", type=Path, help="JSON file with options of the engine sim, and model, noise_seed"
    )
    return flags


def read_config(file: Path | None) -> SimConfig:
    """The configuration that a file states; without one, the defaults. Raises UsageError where it is none."""
    try:
        config = SimConfig() if file is None else SimConfig.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the settings: {error}") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}".lstrip(": ") for each in error.errors()]
        raise UsageError(f"{file}: {'; '.join(problems)}") from error
    if device_or_none(config.hardware) is not None:
        return config
    from benchctl.records.peaks import resolved_hardware  # noqa: PLC0415 - for few servers

    return config.model_copy(update={"hardware": resolved_hardware(config.hardware)})


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    flags = parser()
    options = flags.parse_args(argv)
    try:
        config = read_config(options.config)
    except UsageError as error:
        flags.error(str(error))
    writer = None if options.step_log is None else open_step_log(options.step_log)
    try:
        server = Server(config, writer)
    except UsageError as error:
        log.error("%s", error)  # noqa: TRY400 - one clear line, no traceback
        return 1
    if config.num_speculative_tokens:
        from benchctl.sim.predict import draft_warnings  # noqa: PLC0415 - heavy, and few servers speculate

        for warning in draft_warnings([config]):
            log.warning("%s", warning.message)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(server.serve(options.host, options.port))
    if writer is not None:
        writer.close()
    return code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # Python takes its modules apart for longer than a short run lasts
