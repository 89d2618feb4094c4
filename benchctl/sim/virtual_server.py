"""A simulated server in virtual time that takes the requests of a profile: no process, no HTTP, no waiting."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from operator import sub
from typing import Final

import msgspec

from benchctl.errors import UsageError
from benchctl.profile.model import Arrival, VariantSettings
from benchctl.records.record import PreparedRequest, RequestRecord
from benchctl.records.schema import StepRecord
from benchctl.sim.core import Core
from benchctl.sim.requests.request import Request
from benchctl.sim.requests.request_records import record_of, refusal_record
from benchctl.sim.requests.static_prefixes import static_prefixes
from benchctl.sim.service import serve
from benchctl.sim.settings import config_of, core_request
from benchctl.sim.simulate import SimLoad, engine_for_config
from benchctl.workload.arrival import launch_offsets_ns

_BURST: Final = Arrival(kind="burst")


class VirtualServer:
    """One server life. ``on_step`` gets each step as it ends.

    Raises UsageError at its start where the simulator cannot serve these settings.
    """

    def __init__(
        self, settings: VariantSettings, *, noise_seed: int = 0, on_step: Callable[[StepRecord], None]
    ) -> None:
        self.config: Final = config_of(settings, noise_seed=noise_seed)
        if self.config.cached_prompts is not None:  # a file that cannot be read is no refusal of requests
            static_prefixes(self.config.cached_prompts, self.config.cached_prompt_tokens)
        self._settings: Final = settings
        self._core: Final = Core(engine_for_config(self.config))
        self._on_step: Final = on_step

    @property
    def now_ns(self) -> int:
        return self._core.engine.now_ns

    def send_burst(self, requests: Items[PreparedRequest]) -> Iterator[RequestRecord]:
        """Serve requests of the warm-up that are sent at once; yields each record as its request ends."""
        return self._send(requests, _BURST, is_warmup=True)

    def send_load(self, requests: Items[PreparedRequest], arrival: Arrival) -> Iterator[RequestRecord]:
        """Serve the load on its schedule; yields each record as its request ends."""
        return self._send(requests, arrival, is_warmup=False)

    def _send(
        self, requests: Items[PreparedRequest], arrival: Arrival, *, is_warmup: bool
    ) -> Iterator[RequestRecord]:
        servable: dict[str, tuple[PreparedRequest, Request]] = {}
        for prepared in requests:
            try:
                servable[prepared.request_id] = prepared, self.check_servable(prepared)
            except UsageError as error:
                yield refusal_record(prepared, error, self.now_ns + prepared.arrival_ns, is_warmup=is_warmup)
        planned_ns = [prepared.arrival_ns for prepared, _ in servable.values()]
        launches_ns = launch_offsets_ns(planned_ns, arrival.launch_rate_limit)
        held_ns = dict(zip(servable, map(sub, launches_ns, planned_ns), strict=True))
        load = SimLoad(
            requests=tuple(request for _, request in servable.values()),
            arrival_ns=launches_ns,
            max_concurrency=arrival.max_concurrency,
            is_warmup=is_warmup,
        )
        for served in serve(self._core, load, self._on_step):
            prepared, _ = servable[served.request_id]
            record = record_of(
                served, prepared, self.config, is_warmup=is_warmup, is_open_loop=arrival.is_open_loop
            )
            if arrival.is_open_loop:  # planned before the limit held it back
                record = msgspec.structs.replace(
                    record, scheduled_ns=record.scheduled_ns - held_ns[served.request_id]
                )
            yield record

    def check_servable(self, prepared: PreparedRequest) -> Request:
        """The request in the words of the core. Raises UsageError where it would be refused."""
        request = core_request(prepared, self._settings, self.config)
        self._core.engine.check_servable(request)
        return request
