"""A fresh engine for a configuration."""

from importlib import import_module

from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import cost_model_for, published_noise
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.guided_rows import GuidedRows
from benchctl.sim.walk import Walk, walk_steps


def engine_for_config(config: SimConfig, walk: Walk = walk_steps) -> SimulatedEngine:
    """A server life at its start. Raises UsageError when the configuration names an unknown model or device."""
    noise = None
    if config.noise == "published":
        noise = published_noise(config.noise_seed, has_value_model=config.value_model is not None)
    kind = SimulatedEngine
    if config.num_speculative_tokens:
        kind = import_module("benchctl.sim.drafts").SpeculativeEngine
    return kind(config, cost_model_for(config), noise, walk, guided_rows_for(config))


def guided_rows_for(config: SimConfig) -> GuidedRows:
    """The rows that a value model scores, by the configured way of drawing. Only the aggregate one needs arrays."""
    if config.guided_rows == "exact" or config.value_model is None:
        return GuidedRows(config)
    rows: GuidedRows = import_module("benchctl.sim.aggregate").AggregateRows(config)
    return rows
