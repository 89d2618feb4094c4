"""Stands in for the front end of a vLLM server: loads the plugin as vLLM does and tells it of scripted steps.

Reads a JSON list from standard input; each entry has ``message`` (``timestamp``, ``events``) or null, and the
statistics ``scheduler`` and ``iteration``, or null. Prints how many plugins it found.
"""

import asyncio
import json
import logging
import sys
from enum import IntEnum
from importlib.metadata import entry_points
from types import SimpleNamespace

from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.metrics.loggers import StatLoggerBase


class EventType(IntEnum):
    """As vLLM numbers them."""

    QUEUED = 1
    SCHEDULED = 2


def thing(said):
    """JSON as objects with attributes; numbers stay."""
    if isinstance(said, list):
        return [thing(each) for each in said]
    if isinstance(said, dict):
        return SimpleNamespace(**{name: thing(value) for name, value in said.items()})
    return said


def message_of(said):
    """A message of the engine's process."""
    events = [
        SimpleNamespace(type=EventType[name], timestamp=timestamp) for name, timestamp in said.get("events", ())
    ]
    return SimpleNamespace(timestamp=said["timestamp"], outputs=[SimpleNamespace(events=events or None)])


async def serve(steps):
    """Receive each step's message and record it, as the output loop of vLLM does."""
    loggers = [found.load() for found in entry_points(group="vllm.stat_logger_plugins")]
    assert all(issubclass(logger, StatLoggerBase) for logger in loggers)
    config = thing(json.loads(sys.argv[1])) if len(sys.argv) > 1 else SimpleNamespace()
    made = [logger(config, 0) for logger in loggers]
    for logger in made:
        logger.log_engine_initialized()
    client = AsyncMPClient([message_of(step["message"]) for step in steps if step["message"]])
    for step in steps:
        if step["message"]:
            await client.get_output_async()
        for logger in made:
            logger.record(thing(step["scheduler"]), thing(step["iteration"]), mm_cache_stats=None, engine_idx=0)
            logger.log()
    sys.stdout.write(f"{len(made)}\n")


logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
asyncio.run(serve(json.load(sys.stdin)))
