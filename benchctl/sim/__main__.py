"""``python -m benchctl.sim``: start the simulated server."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import uvloop

from benchctl.errors import UsageError
from benchctl.profile.choices import COST_MODELS
from benchctl.records.peaks import resolved_hardware
from benchctl.sim.config import GuidedRowsMode, Noise, Revision, Scheduling, SimConfig
from benchctl.sim.http.server import Server, open_step_log
from benchctl.steptime.work import Backfill

log = logging.getLogger("benchctl.sim")

_DEFAULTS: Final = SimConfig()


def parser() -> argparse.ArgumentParser:
    """Every option of SimConfig is a flag, next to where to listen and where to log."""
    flags = argparse.ArgumentParser(prog="python -m benchctl.sim", description=__doc__, allow_abbrev=False)
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--step-log", type=Path, help="JSON Lines file for the step records; overwritten")
    flags.add_argument("--model", default=_DEFAULTS.model)
    flags.add_argument("--value-model", help="value model for guided decoding; a stock server without it")
    flags.add_argument("--cost-model", choices=tuple(COST_MODELS), default=_DEFAULTS.cost_model)
    flags.add_argument("--layer-profile", help="folder of measured layer times, for the cost model layer-profile")
    flags.add_argument("--step-time-model", help="file of a step-time model, for the cost model fitted")
    flags.add_argument("--hardware", default=_DEFAULTS.hardware)
    flags.add_argument("--time-scale", type=float, default=_DEFAULTS.time_scale, help="virtual per wall seconds")
    flags.add_argument("--noise", choices=get_args(Noise), default=_DEFAULTS.noise)
    flags.add_argument("--noise-seed", type=int, default=_DEFAULTS.noise_seed)
    flags.add_argument("--revision", choices=get_args(Revision), default=_DEFAULTS.revision)
    flags.add_argument("--scheduling", choices=get_args(Scheduling), default=_DEFAULTS.scheduling)
    flags.add_argument("--guided-rows", choices=get_args(GuidedRowsMode), default=_DEFAULTS.guided_rows)
    _add_speculation(flags)
    flags.add_argument("--cached-prompts", help="JSON Lines of prompts, for a prefix cache that never changes")
    for name in ("overlap-schedule", "async-scheduling", "enable-prefix-caching"):
        default = getattr(_DEFAULTS, name.replace("-", "_"))
        flags.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default)
    for name in (
        "max-num-seqs",
        "max-num-batched-tokens",
        "num-kv-blocks",
        "block-size",
        "max-model-len",
        "tensor-parallel-size",
        "tokens-per-chunk",
        "cached-prompt-tokens",
    ):
        flags.add_argument(f"--{name}", type=int, default=getattr(_DEFAULTS, name.replace("-", "_")))
    flags.add_argument("--start-delay-s", type=float, default=_DEFAULTS.start_delay_s, help="time until ready")
    flags.add_argument(
        "--schedule-patience-s",
        type=float,
        default=_DEFAULTS.schedule_patience_s,
        help="how long an announced request is waited for",
    )
    return flags


def _add_speculation(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--num-speculative-tokens", type=int, default=0, help="tokens drafted for each row; 0: none")
    flags.add_argument("--acceptance", type=_numbers, help="one probability, or one for each position")
    flags.add_argument("--acceptance-spread", type=float, default=0.0, help="how much requests differ, 0 to 1")
    flags.add_argument("--draft-model", help="model whose passes are drafts")
    flags.add_argument("--draft-cost", type=float, help="time of a drafting pass over that of a decode step")
    flags.add_argument("--bonus-token", action=argparse.BooleanOptionalAction, default=_DEFAULTS.bonus_token)
    flags.add_argument("--backfill", choices=get_args(Backfill), default=_DEFAULTS.backfill)


def _numbers(text: str) -> float | tuple[float, ...]:
    return tuple(map(float, text.split(","))) if "," in text else float(text)


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    flags = parser()
    options = vars(flags.parse_args(argv))
    host, port, step_log = options.pop("host"), options.pop("port"), options.pop("step_log")
    try:
        config = SimConfig(**options | {"hardware": resolved_hardware(options["hardware"])})
    except UsageError as error:
        flags.error(str(error))
    writer = open_step_log(step_log) if step_log is not None else None
    try:
        server = Server(config, writer)
    except UsageError as error:
        log.error("%s", error)  # noqa: TRY400 - one clear line, no traceback
        return 1
    if config.num_speculative_tokens:
        from benchctl.sim.predict import draft_warnings  # noqa: PLC0415 - profiles, where there are drafts

        for warning in draft_warnings([config]):
            log.warning("%s", warning.message)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(server.serve(host, port))
    if writer is not None:
        writer.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
