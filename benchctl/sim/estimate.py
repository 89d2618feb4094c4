"""The duration of a run, estimated beforehand by simulating its load in virtual time."""

import dataclasses
from collections.abc import Sequence
from typing import Final

from benchctl.engines.openai_server import own_options
from benchctl.engines.sim.options import SimOptions
from benchctl.profile.model import VariantSettings
from benchctl.profile.workload import Arrival
from benchctl.records.request import PreparedRequest
from benchctl.sim.settings import config_of, core_request
from benchctl.sim.simulate import SimLoad, simulate
from benchctl.units import s_from_ns

_OVERHEAD_S: Final = 0.6
"""Starting, warming up and stopping one simulated server, beyond its configured delay."""


def estimated_run_s(settings: VariantSettings, requests: Sequence[PreparedRequest], arrival: Arrival) -> float:
    """Wall time of one run: its load without noise, and the overhead of a run."""
    options = own_options(settings, SimOptions)
    config = dataclasses.replace(config_of(settings), noise="none")
    load = SimLoad(
        requests=tuple(core_request(request, settings, config) for request in requests),
        arrival_ns=tuple(request.arrival_ns for request in requests),
        max_concurrency=arrival.max_concurrency,
    )
    load_s = s_from_ns(simulate(config, [load]).makespan_ns()) / options.time_scale
    return load_s + _OVERHEAD_S + options.start_delay_s
