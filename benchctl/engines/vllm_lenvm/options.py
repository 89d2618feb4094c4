"""Options of the engine ``vllm-lenvm``."""

from typing import Annotated, ClassVar, Literal

from pydantic import model_validator

from benchctl.engines.vllm_options import VllmOptions
from benchctl.profile.choices import ByteCount, Flag, StepCount, check_rules


class VllmLenvmOptions(VllmOptions):
    """Options of the engine ``vllm-lenvm``, a stock vLLM with our guidance; null leaves the choice to vLLM."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset({"value_model"})

    value_model: str | None = None
    """Directory of the value model that the server loads for guidance; null: a stock vLLM."""
    value_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the value model's weights; ``auto`` as they are stored."""
    value_load_format: Literal["auto", "dummy"] = "auto"
    """Source of the value model's weights; ``dummy`` draws random ones on the device and needs none on disk."""
    value_memory_bytes: ByteCount | None = None
    """Most memory for the prefixes that the value model keeps, for which max_num_seqs and max_model_len are
    multiplied; null: whatever that takes. It is a part of gpu_memory_utilization; ``benchctl doctor --profile``
    says how large it is."""
    fused: bool = True
    """Extend prefixes and score candidates in one forward pass of the value model; if false, in two."""
    value_reuse: bool | None = None
    """Keep the keys and values of the candidate that is drawn, instead of computing its token again; null: where
    ``fused`` is true, because two passes cannot."""
    value_graphs: bool = True
    """Run the value model's forward passes as CUDA graphs."""
    value_kernels: bool = True
    """Compute what lies between the value model's matrix products by kernels of benchctl, on a GPU that gives the
    same values with them; if false, by torch."""
    value_skips_early: bool | None = None
    """Wait in each step for the numbers of candidates, to keep rows without a choice from the value model; null:
    while a quarter of the rows or more have none."""
    lazy: bool = False
    """Load the value model with the first request that needs it, rather than at the start."""
    skip_noop: bool = False
    """Skip guidance that changes no probability; if false, it is computed and its price measured."""
    guidance_clock: Literal["host", "device"] = "host"
    """Clock of the sections of guidance: the host's, which on a GPU times launches, or the GPU's."""
    stride: StepCount = 1
    """Guide every n-th step of a request."""
    overlap_schedule: Annotated[bool | None, Flag("--async-scheduling")] = None
    """Overlap the scheduler with the device: the name of ``async_scheduling`` on other guided engines."""

    @model_validator(mode="after")
    def _can_guide(self) -> "VllmLenvmOptions":
        guides = self.value_model is not None
        option = "num_speculative_tokens" if self.num_speculative_tokens else "speculative_config"
        check_rules(
            (
                self.overlap_schedule is not None and self.async_scheduling not in (None, self.overlap_schedule),
                (
                    f"overlap_schedule is {self.overlap_schedule} and async_scheduling {self.async_scheduling}, "
                    "which are two names of one option; leave one of them out"
                ),
            ),
            (
                bool(self.value_reuse) and not self.fused,
                (
                    "value_reuse is true and fused false: in two passes every token of a prefix is computed; set "
                    "value_reuse to false, or leave it out"
                ),
            ),
            (
                guides and self.tensor_parallel_size != 1,
                (
                    f"tensor_parallel_size is {self.tensor_parallel_size} with a value model, which guides servers "
                    "of one device; set it to 1, or drop value_model"
                ),
            ),
            (
                guides and self.speculates,
                (
                    f"{option} and value_model exclude each other: vLLM cannot guide drafted tokens; drop one of "
                    "the two"
                ),
            ),
        )
        return self

    @property
    def reuses(self) -> bool:
        """True where no token of an answer goes through the value model twice."""
        return self.fused if self.value_reuse is None else self.value_reuse

    @property
    def skips_neutral_guidance(self) -> bool:
        return self.skip_noop
