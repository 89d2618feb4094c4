"""The cost model that a configuration names."""

from benchctl.costs.hardware import hardware_for
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.lenvm import lenvm_cost
from benchctl.sim.costs.llm_mock import price_mock_step
from benchctl.sim.costs.roofline import roofline_cost
from benchctl.sim.costs.step_cost import CostModel


def cost_model_for(config: SimConfig) -> CostModel:
    """Raises UsageError when a model or the hardware is unknown."""
    if config.cost_model == "llm-mock":
        return price_mock_step
    shape, hardware = shape_for(config.model), hardware_for(config.hardware)
    value_shape = _value_shape(config.value_model)
    if config.cost_model == "roofline":
        return roofline_cost(shape, value_shape, hardware)
    return lenvm_cost(config, shape, value_shape, hardware)


def _value_shape(name: str | None) -> ModelShape | None:
    return None if name is None else shape_for(name).as_value_model()
