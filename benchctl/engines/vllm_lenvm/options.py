"""Options of the engine ``vllm-lenvm``."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from benchctl.engines.vllm.options import VllmOptions
from benchctl.profile.engine_options import Flag


class VllmLenvmOptions(VllmOptions):
    """Options of the engine ``vllm-lenvm``, a stock vLLM with benchctl's guidance; what is null is left to vLLM."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset({"value_model"})

    value_model: str | None = None
    """Directory of the value model that the server loads for guidance; null: vLLM as it comes."""
    value_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the value model's weights; ``auto`` as they are stored."""
    value_load_format: Literal["auto", "dummy"] = "auto"
    """How the value model's weights are read; ``dummy`` draws random ones on the device and needs none on disk."""
    value_memory_bytes: int | None = Field(default=None, ge=1)
    """Most memory for the prefixes that the value model keeps, for which max_num_seqs and max_model_len are
    multiplied; null: whatever that takes. vLLM does not count it: leave room with gpu_memory_utilization."""
    fused: bool = True
    """Whether prefixes are extended and candidates scored in one forward of the value model, or in two."""
    value_graphs: bool = True
    """Whether the value model's forwards are CUDA graphs."""
    value_stream: bool = False
    """Whether the value model computes on a CUDA stream of its own."""
    lazy: bool = False
    """Whether the value model is loaded by the first request that needs it, rather than at the start."""
    skip_noop: bool = False
    """Whether guidance that changes no probability is left out; computed all the same, its price is measured."""
    guidance_clock: Literal["host", "device"] = "host"
    """Whose times the sections of guidance are: the host's, which on a GPU are times of launching, or the GPU's."""
    stride: int = Field(default=1, ge=1)
    """Every so many steps of a request are guided."""
    overlap_schedule: Annotated[bool | None, Flag("--async-scheduling")] = None
    """Whether the scheduler works while the device does, as other guided engines call ``async_scheduling``."""

    @model_validator(mode="after")
    def _can_guide(self) -> "VllmLenvmOptions":
        if self.overlap_schedule is not None and self.async_scheduling not in (None, self.overlap_schedule):
            raise ValueError(
                f"overlap_schedule is {self.overlap_schedule} and async_scheduling {self.async_scheduling}, which "
                "are two names of one thing; leave one of them out"
            )
        if self.value_model is None:
            return self
        if self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size} with a value model, which guides servers of "
                "one device; set it to 1, or drop value_model"
            )
        if self.speculative_config is not None:
            raise ValueError(
                "speculative_config and value_model exclude each other: vLLM lets nothing guide tokens that were "
                "drafted; drop one of the two"
            )
        return self

    @property
    def guides_with(self) -> str | None:
        return self.value_model
