"""Runs of any engine predicted beforehand: their load simulated in virtual time, with step times from a model."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from benchctl.analysis.attribution.work import fitted_draft_warnings
from benchctl.analysis.metrics.run import drafter_of
from benchctl.costs.hardware import hardware_for, hardware_or_none
from benchctl.costs.shapes import shape_for
from benchctl.engines.engine import own_options
from benchctl.engines.sim.options import SimOptions
from benchctl.errors import UsageError
from benchctl.profile.arrival import Arrival, launch_offsets_ns
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.profile.settings import load_part, under_load
from benchctl.records.directory import RequestSets, arm_label, cell_name
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import ResultWarning
from benchctl.sim.config import MAX_MODEL_LEN, SimConfig
from benchctl.sim.core import SimLoad
from benchctl.sim.costs.cost_model import StepBatch, cost_model_for
from benchctl.sim.requests import Prompt, Request, SamplingParams
from benchctl.sim.simulation import Simulation, simulate
from benchctl.sim.virtual import config_of, core_request
from benchctl.steptime.model import StepTimeModel, read_model
from benchctl.steptime.queueing import PredictedLoad, RequestSize, ServerLimits, kv_capacity_tokens, load_at_rate
from benchctl.steptime.work import Deployment, StepWork
from benchctl.units import GIGA, NS_PER_S, TERA, percentage, percentage_change, s_from_ns
from benchctl.workload.opening import Burst, opening_of
from benchctl.workload.turns import thinks_before


def profile_draft_warnings(profile: Profile) -> tuple[ResultWarning, ...]:
    """Those of all arms of an experiment, none for an engine that is not simulated.

    Raises UsageError for a step-time model that cannot be read.
    """
    if profile.engine.kind != "sim":
        return ()
    return draft_warnings(config_of(variant_settings(profile, variant, cell)) for variant, cell in arms(profile))


def draft_warnings(configs: Iterable[SimConfig]) -> tuple[ResultWarning, ...]:
    """One warning for each step-time model that does not know the most draft tokens of these servers."""
    most: dict[str, int] = {}
    for config in configs:
        if config.step_time_model is not None:
            file = config.step_time_model
            most[file] = max(most.get(file, 0), config.num_speculative_tokens)
    return tuple(
        warning
        for file, num_draft_tokens in most.items()
        if num_draft_tokens
        for warning in fitted_draft_warnings(read_model(Path(file).expanduser()), file, num_draft_tokens)
    )


_UNLIMITED_BLOCKS: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The origin of the step times of an engine that is not simulated.

    ``step_time_model`` is the file of a fitted model; without one they are the roofline of ``hardware``.
    """

    hardware: str
    step_time_model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """The load of one run, without the start of its server. Times are on the engine's clock."""

    load_s: float
    """First request to last token."""
    step_s: float
    batch: float
    """Rows of the batch, averaged over time."""
    largest_batch: int
    kv_frac: float | None
    """Largest share of the key-value memory in use; None without a known limit."""
    num_preempted: int
    ttft_s: float
    e2el_s: float
    num_steps: int
    in_server: float
    """Sequences in the server on average, waiting ones included (Little's law)."""
    offered: PredictedLoad | None
    """Steady state at the offered rate; None for a load that is not offered at a rate, and with speculation, whose
    steps yield several tokens."""
    offered_rate: float | None
    """Requests per second; None for a closed loop and a burst."""


def predict_run(
    settings: VariantSettings,
    requests: Sequence[PreparedRequest],
    arrival: Arrival,
    times: StepTimes | None = None,
    opening: tuple[Burst, int] = ((), 0),
) -> PredictedRun:
    """The load of a run with these settings. ``times`` is None for the simulator with its own cost model.

    ``opening`` is that of ``opening_of``; its time belongs to the load, its requests and steps do not.

    Raises UsageError for a model whose shape is unknown, or a step-time model of another hardware.
    """
    sent, num_warmups = (*opening[0], *requests), opening[1]
    if times is None:
        config = config_of(settings).model_copy(update={"noise": "none"})
        core_requests = tuple(
            _emulated_request(request, settings) if request.turn else core_request(request, settings, config)
            for request in sent
        )
    else:
        config = emulated_config(settings, times)
        core_requests = tuple(_emulated_request(request, settings) for request in sent)
    load = SimLoad(
        requests=core_requests,
        arrival_ns=launch_offsets_ns((request.arrival_ns for request in sent), arrival.launch_rate_limit),
        max_concurrency=arrival.max_concurrency,
        num_warmups=num_warmups,
        thinks_ns=thinks_before(sent),
    )
    simulation, rate = simulate(config, [load]), _offered_rate(requests, arrival)
    steps, ended = simulation.step_columns(), simulation.requests
    if num_warmups:
        ended = ended.of(ended.index >= num_warmups)
    opening_ns = int(simulation.step_columns(is_warmup=True).dur_ns.sum())
    used = steps.optional("kv_used_blocks")
    is_limited = used is not None and config.num_kv_blocks < _UNLIMITED_BLOCKS
    return PredictedRun(
        load_s=s_from_ns(simulation.makespan_ns() + opening_ns) / config.time_scale,
        step_s=s_from_ns(float(steps.dur_ns.mean())),
        batch=float(np.average(steps.num_seqs, weights=steps.dur_ns)),
        largest_batch=int(steps.num_seqs.max()),
        kv_frac=float(np.nanmax(used)) / config.num_kv_blocks if is_limited and used is not None else None,
        num_preempted=int(ended.preemptions.sum()),
        ttft_s=s_from_ns(fmean(ended.first_token_ns - ended.arrival_ns)),
        e2el_s=s_from_ns(fmean(ended.last_token_ns - ended.arrival_ns)),
        num_steps=len(steps),
        in_server=float((ended.last_token_ns - ended.arrival_ns).sum()) / max(simulation.makespan_ns(), 1),
        offered=_offered(simulation, config, rate),
        offered_rate=rate,
    )


def emulated_config(settings: VariantSettings, times: StepTimes) -> SimConfig:
    """A simulated server with the limits of a real one, and with its step times."""
    options, limits = settings.server, ServerLimits()
    rows = getattr(options, "max_num_seqs", None) or limits.max_num_seqs
    budget = getattr(options, "max_num_batched_tokens", None) or limits.max_num_batched_tokens
    blocks, block_size = _kv_blocks(settings, times)
    devices: int = getattr(options, "tensor_parallel_size", 1)
    return SimConfig(
        model=settings.model,
        cost_model="roofline" if times.step_time_model is None else "fitted",
        step_time_model=times.step_time_model,
        tensor_parallel_size=1 if times.step_time_model is None else devices,
        hardware=_together(times.hardware, devices) if times.step_time_model is None else times.hardware,
        max_num_seqs=rows,
        max_num_batched_tokens=max(budget, rows),
        num_kv_blocks=blocks,
        block_size=block_size,
        max_model_len=getattr(options, "max_model_len", None) or MAX_MODEL_LEN,
        enable_prefix_caching=getattr(options, "enable_prefix_caching", False),
    )


def _together(hardware: str, devices: int) -> str:
    """Devices that share each layer as one with the sum of their peaks, as the roofline takes them."""
    if devices == 1:
        return hardware
    one = hardware_for(hardware)
    flops, rate = devices * one.peak_flops_per_s / TERA, devices * one.bandwidth_bytes_per_s / GIGA
    return f"{devices} x {one.name.partition(':')[0]}:{flops:g}:{rate:g}"


def _kv_blocks(settings: VariantSettings, times: StepTimes) -> tuple[int, int]:
    """Blocks of the cache and tokens of a block: as the options say, else what the device's memory holds.

    A draft model of known shape takes its share of that memory; one of unknown shape takes none.
    """
    options = settings.server
    block_size = getattr(options, "block_size", None) or 16
    if (blocks := getattr(options, "num_kv_blocks", None)) is not None:
        return blocks, block_size
    hardware = hardware_for(times.hardware)
    if hardware.memory_bytes is None:
        return _UNLIMITED_BLOCKS, block_size
    tensor_parallel: int = getattr(options, "tensor_parallel_size", 1)
    deployment = Deployment(shape=shape_for(settings.model), hardware=hardware, tensor_parallel=tensor_parallel)
    drafter = drafter_of(options)
    shape = None if drafter is None else drafter.shape
    draft = None if shape is None else dataclasses.replace(deployment, shape=shape)
    return max(1, int(kv_capacity_tokens(deployment, draft=draft)) // block_size), block_size


def _emulated_request(request: PreparedRequest, settings: VariantSettings) -> Request:
    """The request as a server sees it: with the tokens counted beforehand, and those shared that the plan says."""
    sampling = settings.sampling
    return Request(
        request_id=request.request_id,
        prompt=Prompt(
            num_tokens=request.prompt_tokens, digest=request.request_id, asks_for_box=False, block_hashes=()
        ),
        max_tokens=request.max_tokens,
        n=request.n,
        seed=request.seed,
        static_tokens=request.shared_tokens if getattr(settings.server, "enable_prefix_caching", False) else 0,
        ignore_eos=request.ignore_eos,
        sampling=SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p
        ),
    )


def _offered_rate(requests: Sequence[PreparedRequest], arrival: Arrival) -> float | None:
    """Requests per second of a load that is sent whatever the server does."""
    if not arrival.is_open_loop or len(requests) < 2:
        return None
    span_ns = max(request.arrival_ns for request in requests) - min(request.arrival_ns for request in requests)
    return (len(requests) - 1) * NS_PER_S / span_ns if span_ns else None


def _offered(simulation: Simulation, config: SimConfig, rate: float | None) -> PredictedLoad | None:
    if rate is None or config.num_speculative_tokens:
        return None
    requests = simulation.requests
    size = RequestSize(
        prompt_tokens=float(requests.prompt_tokens.mean()),
        output_tokens=float(requests.output_tokens.mean()),
        cached_tokens=float(requests.cached_tokens.mean()),
    )
    kv_tokens = None if config.num_kv_blocks >= _UNLIMITED_BLOCKS else config.num_kv_blocks * config.block_size
    limits = ServerLimits(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens, kv_tokens=kv_tokens
    )
    return load_at_rate(rate, size, _step_seconds(config), limits)


def _step_seconds(config: SimConfig) -> Callable[[StepWork], float]:
    """Seconds of a step by the cost model of a server, for rows of fractional number as well."""
    price = cost_model_for(config).price

    def at(rows: int, work: StepWork) -> float:
        share = rows / num_decodes if (num_decodes := float(work.num_decodes)) else 0.0
        batch = StepBatch(
            num_seqs=rows + round(float(work.num_prefills)),
            num_prefill_tokens=round(float(work.prefill_tokens)),
            num_decode_tokens=rows,
            num_sampling=rows + round(float(work.num_sampled) - num_decodes),
            context_tokens=rows
            + round(float(share * work.decode_context + work.prefill_context + work.prefill_tokens)),
            attended_positions=round(float(work.prefill_positions + share * work.decode_positions)),
            is_greedy=False,
        )
        return s_from_ns(price(batch).total_ns())

    def step_s(work: StepWork) -> float:
        rows = math.floor(float(work.num_decodes))
        part = float(work.num_decodes) - rows
        below_s = at(rows, work) if part < 1 and (rows or work.num_prefills) else 0.0
        return below_s if not part else (1 - part) * below_s + part * at(rows + 1, work)

    return step_s


ROOFLINE_MAPE_FRAC: Final = 0.325
"""Published mean error of a roofline on 1,967 steps of vLLM with Llama-2-70B and CodeLlama-34B on H100: real steps
took longer. Its terms add up; see ``docs/measurements/step-time.md`` for the larger of both."""
NO_STEP_TIMES: Final = (
    "step times unknown: this machine has no GPU and the profile states no hardware; a model of 'benchctl steptime "
    "fit' predicts them (--step-time-model FILE)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrediction:
    """The load of each arm's runs by its label, and the origin of the step times in words."""

    runs: Mapping[str, PredictedRun]
    basis: str
    overhead_s: float | None = None
    """Seconds of a run beyond its load; None for engines whose starts only earlier runs can tell."""
    warnings: tuple[ResultWarning, ...] = ()


def predict_plan(
    profile: Profile, requests: RequestSets, gpus: Sequence[str], named: Path | None = None
) -> PlanPrediction | str:
    """Predict the runs of every arm; the reason in words where their step times are unknown.

    ``gpus`` are the drivers' names of this machine's devices, ``named`` a step-time model instead of the profile's.
    Raises UsageError for a step-time model that is damaged or of another hardware.
    """
    key = "--step-time-model"
    if named is None and profile.step_time_model is not None:
        key, named = "step_time_model", Path(profile.step_time_model)
    if named is not None:
        try:
            model = read_model(named)
        except UsageError as error:
            raise UsageError(f"{key}: {error}") from error
        _check_hardware(profile, gpus, model, str(named))
        times = StepTimes(hardware=model.hardware, step_time_model=str(named))
        return _predict(profile, requests, times, model_basis(model, str(named)))
    if profile.engine.kind == "sim":
        return _predict(profile, requests, None, "step times are those of the simulator without its noise")
    hardware = stated_hardware(profile, gpus)
    if hardware is None:
        return NO_STEP_TIMES
    basis = (
        f"step times are the roofline of {hardware}, below which no step can be; on 1,967 real steps it was "
        f"{percentage(ROOFLINE_MAPE_FRAC)} off (closer: --step-time-model FILE, from 'benchctl steptime fit')"
    )
    return _predict(profile, requests, StepTimes(hardware=hardware), basis)


def stated_hardware(profile: Profile, gpus: Sequence[str]) -> str | None:
    """The GPU of this machine as the hardware table has it, else the device that the profile states, else None.

    The default of ``hardware`` states nothing, and the GPUs of this machine nothing about a server elsewhere.
    Measured peaks, which a profile only has where it asks for them, come before the data sheet of the GPU.
    """
    stated = hardware_for(profile.hardware)
    if stated.measured_at is not None:
        return stated.name
    for name in () if profile.engine.kind == "attach" else gpus:
        if (device := hardware_or_none(name)) is not None:
            return device.name
    return stated.name if "hardware" in profile.model_fields_set else None


def model_basis(model: StepTimeModel, name: str) -> str:
    """The origin of a fitted model, and how far its predictions of steps that its fit did not see have been off."""
    origin = model.provenance
    text = f"step times are those of {name}, fitted to {origin.num_steps:,} steps of {len(origin.runs)} runs"
    if not origin.held_out:
        return f"{text}; its error on other steps is not known"
    error = origin.held_out[0]
    return (
        f"{text}; where whole parts were left out of the fit ({error.by}) it was "
        f"{percentage(error.mape_frac, 2)} off, {percentage_change(error.bias_frac)} on average"
    )


def _check_hardware(profile: Profile, gpus: Sequence[str], model: StepTimeModel, name: str) -> None:
    """Raises UsageError for a model of another device than the one that will be measured."""
    if profile.engine.kind == "sim":
        baseline = variant_settings(profile, profile.baseline, {})
        device: str | None = hardware_for(own_options(baseline, SimOptions).hardware).name
    else:
        device = stated_hardware(profile, gpus)
    if device is not None and hardware_for(device).device != hardware_for(model.hardware).device:
        raise UsageError(
            f"{name}: a step-time model of {model.hardware}, and this experiment runs on {device}; name a model of "
            f"{device}, or carry this one over with 'benchctl steptime calibrate'"
        )


def _predict(profile: Profile, requests: RequestSets, times: StepTimes | None, basis: str) -> PlanPrediction:
    runs: dict[str, PredictedRun] = {}
    by_settings: dict[str, PredictedRun] = {}
    speculates = False
    for variant, cell in arms(profile):
        settings = variant_settings(profile, variant, cell)
        speculates |= bool(settings.server.speculates)
        # the same run under another name
        key = settings.model_dump_json(exclude={"variant"}) + cell_name(load_part(cell))
        if key not in by_settings:
            loaded, sent = under_load(profile, cell), requests.of(cell)
            by_settings[key] = predict_run(settings, sent, loaded.workload.arrival, times, opening_of(sent, loaded))
        runs[arm_label(variant, cell)] = by_settings[key]
    if times is not None and any(variant.guidance is not None for variant in profile.variants.values()):
        basis += "; the value model of guided arms is not in them"
    if times is not None and speculates:
        basis += (
            "; arms that speculate are predicted without their drafts, and with the memory that a draft model of "
            "known shape takes"
        )
    overhead_s = None
    if profile.engine.kind == "sim":
        baseline = variant_settings(profile, profile.baseline, {})
        # Starting, warming up and stopping one simulated server, beyond its configured delay
        overhead_s = 0.6 + own_options(baseline, SimOptions).start_delay_s
    return PlanPrediction(runs=runs, basis=basis, overhead_s=overhead_s, warnings=profile_draft_warnings(profile))
