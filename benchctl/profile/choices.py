"""Datasets and cost models: each name that a profile may use, and the module that implements it.

To add one, write its module and add its line here. The modules lie in rooms above this one; they are loaded by name
when a run needs them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

NO_REQUESTS: Final = "none"
"""Name of the dataset without prompts."""
DATASETS: Final = {
    "gsm8k": "benchctl.workload.datasets.published.gsm8k",
    "sharegpt": "benchctl.workload.datasets.published.sharegpt",
    "sharegpt-replay": "benchctl.workload.datasets.published.replay",
    "azure-trace": "benchctl.workload.datasets.published.azure",
    "mooncake": "benchctl.workload.datasets.published.mooncake",
    "custom": "benchctl.workload.datasets.own.custom",
    "huggingface": "benchctl.workload.datasets.own.huggingface",
    "synthetic": "benchctl.workload.datasets.made.synthetic",
    "generated": "benchctl.workload.datasets.made.generated",
    NO_REQUESTS: "benchctl.workload.datasets.made.none",
}
"""Values of ``workload.dataset``, and modules with a ``DATASET``."""


@dataclass(frozen=True, slots=True)
class CostModelChoice:
    """A cost model of the simulator: a module with a function ``cost_model``.

    ``uses_shapes`` is False where step times depend on neither the models' shapes nor the device. Such a cost model
    serves models of any name. ``verifies_drafts`` is True where steps with several new tokens of a decoding row
    have a price, ``prices_other_models`` where a draft model has one beside the model. ``file_option`` is the
    engine option that names the measurements that it prices steps by.
    """

    module: str
    uses_shapes: bool = True
    prices_value_model: bool = True
    verifies_drafts: bool = True
    prices_other_models: bool = True
    file_option: str | None = None


COST_MODELS: Final = {
    "lenvm-h100": CostModelChoice("benchctl.sim.costs.lenvm"),
    "roofline": CostModelChoice("benchctl.sim.costs.roofline"),
    "llm-mock": CostModelChoice(
        "benchctl.sim.costs.llm_mock", uses_shapes=False, prices_value_model=False, verifies_drafts=False
    ),
    "layer-profile": CostModelChoice(
        "benchctl.sim.costs.layer_profile",
        prices_value_model=False,
        prices_other_models=False,
        file_option="layer_profile",
    ),
    "fitted": CostModelChoice("benchctl.sim.costs.fitted", file_option="step_time_model"),
}
"""Values of the engine option ``cost_model``."""

if TYPE_CHECKING:
    DatasetName: TypeAlias = str
    CostModelName: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    DatasetName = Literal[tuple(DATASETS)]
    CostModelName = Literal[tuple(COST_MODELS)]


def value_model_error(cost_model: str, value_model: str | None) -> str | None:
    """The reason why the cost model cannot price the value model; None where it can."""
    if value_model is None or COST_MODELS[cost_model].prices_value_model:
        return None
    able = " or ".join(name for name, choice in COST_MODELS.items() if choice.prices_value_model)
    return f"{cost_model} cannot price a value model; drop the value model, or take {able}"


def file_option_error(cost_model: str, files: Mapping[str, str | None]) -> str | None:
    """The reason why the cost model cannot work with these file options, given by name; None where it can."""
    required = COST_MODELS[cost_model].file_option
    for name, file in files.items():
        if file is None and name == required:
            return f"{cost_model} prices steps by measurements; name them with {name}"
        if file is not None and name != required:
            owner = next(owner for owner, choice in COST_MODELS.items() if choice.file_option == name)
            return f"{cost_model} does not read {name}; drop it, or take {owner}"
    return None


def noise_error(cost_model: str, noise: str) -> str | None:
    """The reason why the cost model has no such noise; None where it has."""
    if noise != "fitted" or COST_MODELS[cost_model].file_option == "step_time_model":
        return None
    return f"fitted is the uncertainty of a fitted model, which {cost_model} is not; take none or published"


def devices_error(cost_model: str, tensor_parallel_size: int) -> str | None:
    """The reason why the cost model cannot price so many devices; None where it can."""
    if tensor_parallel_size < 1:
        return f"is {tensor_parallel_size}; it must be at least 1"
    if tensor_parallel_size == 1 or COST_MODELS[cost_model].file_option is not None:
        return None
    able = " or ".join(name for name, choice in COST_MODELS.items() if choice.file_option is not None)
    return f"is {tensor_parallel_size}, and {cost_model} prices one device; leave it out, or take {able}"


PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Parameters of sampling that depend on the tokens so far, and that few requests have."""
