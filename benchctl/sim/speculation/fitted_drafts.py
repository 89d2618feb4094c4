"""Warnings of simulated servers that verify drafts by a fitted step-time model."""

from collections.abc import Iterable
from pathlib import Path

from benchctl.analysis.attribution.work import fitted_draft_warnings
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.schema import ResultWarning
from benchctl.sim.config import SimConfig
from benchctl.sim.settings import config_of
from benchctl.steptime.model_file import read_model


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
