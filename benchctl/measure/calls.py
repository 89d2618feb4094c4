"""The requests of a phase as an engine asks them."""

from collections.abc import Iterable, Iterator

from benchctl.engines.engine import Engine
from benchctl.load.transport.exchange import Call
from benchctl.profile.model import VariantSettings
from benchctl.records.run import PreparedRequest


def calls_of(
    engine: Engine, settings: VariantSettings, requests: Iterable[PreparedRequest], *, is_warmup: bool
) -> Iterator[Call]:
    """``requests`` in the engine's dialect, each made when it is asked for."""
    for request in requests:
        asked = engine.request_call(request, settings)
        yield Call(request=request, path=asked.path, headers=asked.headers, body=asked.body, is_warmup=is_warmup)
