"""A trace of any length on the simulator, of which only the metrics are kept: arrivals and lengths without texts.

Requests are made as they are due and end as rows of numbers, so a million of them fit into memory. The metrics are
those of a run whose records are kept, by the same definitions; those of chunks, of the client, of devices
and of steps, but for their number, stay unknown.
"""

from array import array
from typing import TYPE_CHECKING

import numpy as np

from benchctl.analysis.metrics.latency import latency_metrics, quotient
from benchctl.analysis.metrics.table import METRICS
from benchctl.errors import UsageError
from benchctl.measure.run import noise_seed
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.columns import Integers
from benchctl.records.record import PlannedRun, PreparedRequest
from benchctl.sim.requests.counted_requests import CountedRequests
from benchctl.sim.settings import config_of, core_request
from benchctl.sim.simulate import SimLoad, Simulation, engine_for_config, simulate
from benchctl.units import s_from_ns
from benchctl.workload.datasets.recorded_load import RecordedLoad

if TYPE_CHECKING:
    from collections.abc import Sequence


def simulate_recorded(profile: Profile, planned: PlannedRun, load: RecordedLoad) -> dict[str, float | None]:
    """The metrics of one run. Raises UsageError where it needs texts, or where a request fits no server."""
    settings = variant_settings(profile, planned.variant, planned.cell)
    config = config_of(settings, noise_seed=noise_seed(profile, planned))
    if config.enable_prefix_caching:
        raise UsageError(
            "server.enable_prefix_caching: a trace of which only summaries are kept has no texts that a cache "
            "could find; switch it off, or keep the requests"
        )
    example = PreparedRequest(
        request_id="example", index=0, arrival_ns=0, prompt="a", prompt_tokens=1, max_tokens=1, seed=0, source=""
    )
    template = core_request(example, settings, config)
    requests = CountedRequests(load.prompt_tokens, load.output_tokens, prefix="", template=template)
    longest = int((np.asarray(load.prompt_tokens) + np.asarray(load.output_tokens)).argmax())
    engine_for_config(config).check_servable(requests[longest])
    limit = profile.workload.arrival.max_concurrency
    sim_load = SimLoad(requests=requests, arrival_ns=load.arrival_ns, max_concurrency=limit)
    return _metrics_of(simulate(config, [sim_load], keeps_steps=False), load, limit)


def _metrics_of(simulation: Simulation, load: RecordedLoad, limit: int | None) -> dict[str, float | None]:
    ended = simulation.requests
    sent_ns = _sent_ns(np.asarray(load.arrival_ns), np.sort(ended.last_token_ns), limit)[ended.index]
    several = ended.output_tokens > 1
    tpot_ns = (ended.last_token_ns - ended.first_token_ns)[several] / (ended.output_tokens[several] - 1)
    latencies: dict[str, Sequence[float]] = {
        "ttft": array("q", (ended.first_token_ns - sent_ns).tobytes()),
        "tpot": array("d", tpot_ns.tobytes()),
        "itl": (),
        "e2el": array("q", (ended.last_token_ns - sent_ns).tobytes()),
    }
    wall_s = s_from_ns(int(ended.last_token_ns.max() - sent_ns.min()))
    output_tokens = int(ended.output_tokens.sum())
    metrics: dict[str, float | None] = {
        **latency_metrics(latencies, len(ended)),
        "wall_s": wall_s,
        "client_wall_s": wall_s,
        "num_requests": len(load),
        "num_completed": len(ended),
        "num_failed": len(load) - len(ended),
        "prompt_tokens": int(ended.prompt_tokens.sum()),
        "output_tokens": output_tokens,
        "output_throughput": quotient(output_tokens, wall_s),
        "request_throughput": quotient(len(ended), wall_s),
        "num_steps": simulation.log.num_cleared + len(simulation.log),
        "preemptions": simulation.num_preemptions,
    }
    return {name: metrics.get(name) for name in METRICS}


def _sent_ns(planned_ns: Integers, ends_ns: Integers, limit: int | None) -> Integers:
    """Time of each send: as planned, or with a limit when an earlier request has ended and freed its slot."""
    if limit is None or limit >= len(planned_ns):
        return planned_ns
    return np.maximum(planned_ns, np.concatenate((planned_ns[:limit], ends_ns[: len(planned_ns) - limit])))
