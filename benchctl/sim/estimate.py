"""The duration of a run, estimated beforehand by simulating its load in virtual time."""

from collections.abc import Sequence
from typing import Final

import msgspec

from benchctl.engines.openai_server import own_options
from benchctl.engines.sim.engine import SimEngine
from benchctl.engines.sim.options import SimOptions
from benchctl.profile.model import VariantSettings
from benchctl.profile.workload import Arrival
from benchctl.records.request import PreparedRequest
from benchctl.sim.config import SimConfig
from benchctl.sim.http.openai_api import ChatBody, CompletionBody, request_from
from benchctl.sim.request import Request
from benchctl.sim.simulate import SimLoad, simulate
from benchctl.units import s_from_ns

_OVERHEAD_S: Final = 0.6
"""Starting, warming up and stopping one simulated server, beyond its configured delay."""


def estimated_run_s(settings: VariantSettings, requests: Sequence[PreparedRequest], arrival: Arrival) -> float:
    """Wall time of one run: its load without noise, and the overhead of a run."""
    options = own_options(settings, SimOptions)
    config = SimConfig(
        model=settings.model, noise="none", **options.model_dump(exclude={"port", "noise", "start_delay_s"})
    )
    load = SimLoad(
        requests=tuple(_parsed(request, settings, config) for request in requests),
        arrival_ns=tuple(request.arrival_ns for request in requests),
        max_concurrency=arrival.max_concurrency,
    )
    load_s = s_from_ns(simulate(config, [load]).makespan_ns()) / options.time_scale
    return load_s + _OVERHEAD_S + options.start_delay_s


def _parsed(request: PreparedRequest, settings: VariantSettings, config: SimConfig) -> Request:
    """The request as the server will understand it."""
    kind: type[ChatBody | CompletionBody] = ChatBody if request.messages is not None else CompletionBody
    body: ChatBody | CompletionBody = msgspec.json.decode(
        SimEngine().request_call(request, settings).body, type=kind
    )
    return request_from(body, request.request_id, config)
