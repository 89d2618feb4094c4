"""The server's counters, exposed to Prometheus under vLLM's names."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, zip_longest
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from benchctl.records.schema import StepRecord
from benchctl.sim.engine import SimulatedEngine, StepOutput
from benchctl.units import NS_PER_S

_SHORT_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_LONG_S: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)


class Histogram:
    """Counts of values up to each bound, in seconds of virtual time."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds: Final = bounds
        self._counts: Final = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        buckets = list(zip((*map(repr, self._bounds), "+Inf"), accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


class Counters:
    """Totals since the server started."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_aborted = 0
        self.num_finished = {"stop": 0, "length": 0}
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted: list[int] = []
        """Accepted drafts of each position."""
        self.time_to_first_token: Final = Histogram(_SHORT_S)
        self.inter_token: Final = Histogram(_SHORT_S)
        self.end_to_end: Final = Histogram(_LONG_S)

    def count(self, output: StepOutput) -> None:
        record = output.record
        self.num_generation_tokens += record.output_tokens or 0
        duration_s = record.dur_ns / NS_PER_S
        if num_decodes := (record.num_decode_tokens or 0) - (record.draft_tokens or 0):
            self.inter_token.add(duration_s, num_decodes)
        if record.drafts is not None:
            self._count_drafts(record)
        if record.num_prefill_tokens:
            end_ns = record.start_ns + record.dur_ns
            for seq in output.emitted:
                if seq.first_token_ns == end_ns:
                    self.time_to_first_token.add((end_ns - seq.arrival_ns) / NS_PER_S)
                    self.num_prompt_tokens += seq.prompt_tokens if seq.choice == 0 else 0
        for seq in output.finished:
            self.num_finished[seq.answer.finish_reason] += 1
            self.end_to_end.add(((seq.last_token_ns or 0) - seq.arrival_ns) / NS_PER_S)

    def _count_drafts(self, record: StepRecord) -> None:
        self.num_drafts += record.drafts or 0
        self.num_draft_tokens += record.draft_tokens or 0
        accepted = record.accepted_by_position or ()
        self.num_accepted = [sum(counts) for counts in zip_longest(self.num_accepted, accepted, fillvalue=0)]


class SimCollector:
    """Turns the counters into metric families on request."""

    def __init__(self, engine: SimulatedEngine, counters: Counters) -> None:
        self._engine: Final = engine
        self._counters: Final = counters
        self.lag_s = 0.0
        self.phase_wall_s = 0.0
        self.num_abandoned_phases = 0

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._totals()
        counters, model = self._counters, self._engine.config.model
        for name, histogram in (
            ("time_to_first_token", counters.time_to_first_token),
            ("inter_token_latency", counters.inter_token),
            ("e2e_request_latency", counters.end_to_end),
        ):
            yield histogram.family(f"vllm:{name}_seconds", f"{name}, virtual seconds", model)

    def _gauges(self) -> Iterator[Metric]:
        engine = self._engine
        scheduler, blocks = engine.scheduler, engine.block_manager
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the batch.", scheduler.num_running),
            ("vllm:num_requests_waiting", "Sequences in the queue.", scheduler.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", blocks.num_used / blocks.num_blocks),
            ("benchctl_sim:virtual_seconds", "Virtual time since the start.", engine.now_ns / NS_PER_S),
            ("benchctl_sim:lag_seconds", "Largest lag of wall time in this phase.", self.lag_s),
            ("benchctl_sim:phase_wall_seconds", "Wall time this phase should have taken.", self.phase_wall_s),
            ("benchctl_sim:abandoned_phases", "Announced schedules given up.", self.num_abandoned_phases),
        ):
            yield self._labelled(GaugeMetricFamily(name, text, labels=["model_name"]), float(value))

    def _totals(self) -> Iterator[Metric]:
        counters, engine = self._counters, self._engine
        for name, value in (
            ("vllm:prompt_tokens", counters.num_prompt_tokens),
            ("vllm:generation_tokens", counters.num_generation_tokens),
            ("vllm:num_preemptions", engine.scheduler.num_preemptions),
            ("vllm:prefix_cache_queries", engine.block_manager.num_queried_tokens),
            ("vllm:prefix_cache_hits", engine.block_manager.num_hit_tokens),
        ):
            yield self._labelled(
                CounterMetricFamily(name, f"{name} since the start.", labels=["model_name"]), value
            )
        if engine.config.num_speculative_tokens:
            yield from self._drafts()
        success = CounterMetricFamily(
            "vllm:request_success", "Finished sequences.", labels=["model_name", "finished_reason"]
        )
        for reason, count in (*counters.num_finished.items(), ("abort", counters.num_aborted)):
            success.add_metric([engine.config.model, reason], count)
        yield success

    def _drafts(self) -> Iterator[Metric]:
        counters, model = self._counters, self._engine.config.model
        for name, value in (
            ("vllm:spec_decode_num_drafts", counters.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", counters.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", sum(counters.num_accepted)),
        ):
            yield self._labelled(
                CounterMetricFamily(name, f"{name} since the start.", labels=["model_name"]), value
            )
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens of each position.",
            labels=["model_name", "position"],
        )
        for position, value in enumerate(counters.num_accepted):
            by_position.add_metric([model, str(position)], value)
        yield by_position

    def _labelled(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._engine.config.model], value)
        return family


def exposition(collector: SimCollector) -> bytes:
    """The Prometheus text of this moment."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)
