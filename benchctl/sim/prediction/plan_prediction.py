"""The runs of a plan predicted beforehand, and the origin of their step times.

For an engine that is not simulated the step times are those of the step-time model that is named, else the roofline
of the machine's GPU, else that of the hardware which the profile states. A machine without a GPU has no peaks that
anyone could vouch for: nothing is predicted there without a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.costs.hardware import hardware_for, hardware_or_none
from benchctl.engines.openai_server import own_options
from benchctl.engines.sim.options import SimOptions
from benchctl.errors import UsageError
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.directory import arm_label
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import ResultWarning
from benchctl.sim.prediction.prediction import PredictedRun, StepTimes, predict_run
from benchctl.sim.speculation.fitted_drafts import profile_draft_warnings
from benchctl.steptime.model import StepTimeModel
from benchctl.steptime.model_file import read_model
from benchctl.units import percentage, percentage_change

ROOFLINE_MAPE_FRAC: Final = 0.325
"""Published mean error of a roofline on 1,967 steps of vLLM with Llama-2-70B and CodeLlama-34B on H100: real steps
took longer. Its terms add up; see ``docs/measurements/step-time.md`` for the larger of both."""
_SIM_OVERHEAD_S: Final = 0.6
"""Starting, warming up and stopping one simulated server, beyond its configured delay."""
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
    profile: Profile, requests: Sequence[PreparedRequest], gpus: Sequence[str], named: Path | None = None
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


def _predict(
    profile: Profile, requests: Sequence[PreparedRequest], times: StepTimes | None, basis: str
) -> PlanPrediction:
    runs: dict[str, PredictedRun] = {}
    by_settings: dict[bytes, PredictedRun] = {}
    speculates = False
    for variant, cell in arms(profile):
        settings = variant_settings(profile, variant, cell)
        speculates |= bool(settings.server.speculates)
        key = _key(settings)
        if key not in by_settings:
            by_settings[key] = predict_run(settings, requests, profile.workload.arrival, times)
        runs[arm_label(variant, cell)] = by_settings[key]
    if times is not None and any(variant.guidance is not None for variant in profile.variants.values()):
        basis += "; the value model of guided arms is not in them"
    if times is not None and speculates:
        basis += (
            "; arms that speculate are predicted without their drafts, and with the memory that a draft model of "
            "known shape takes"
        )
    return PlanPrediction(
        runs=runs, basis=basis, overhead_s=_overhead_s(profile), warnings=profile_draft_warnings(profile)
    )


def _overhead_s(profile: Profile) -> float | None:
    if profile.engine.kind != "sim":
        return None
    return _SIM_OVERHEAD_S + own_options(variant_settings(profile, profile.baseline, {}), SimOptions).start_delay_s


def _key(settings: VariantSettings) -> bytes:
    """The settings of a run but for the name of its variant."""
    return settings.model_dump_json(exclude={"variant"}).encode()
