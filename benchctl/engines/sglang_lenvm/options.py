"""Options of the engine ``sglang-lenvm``."""

from typing import ClassVar, Final, Literal

from pydantic import model_validator

from benchctl.engines.sglang.options import SglangOptions
from benchctl.guided.params import REVISIONS_THAT_SKIP
from benchctl.profile.choices import Share, StepCount

LenvmRevision = Literal["V0", "V1", "V2", "V3", "V4"]
"""Generations of SGLang's LenVM fork, which understand requests differently; see docs/engines.md."""
_REVISIONS_WITH_STRIDES: Final = frozenset({"V1", "V3"})


class SglangLenvmOptions(SglangOptions):
    """Options of the engine ``sglang-lenvm``, SGLang's LenVM fork; null leaves the choice to the server."""

    VALUE_MODEL_OPTIONS: ClassVar[frozenset[str]] = frozenset(
        {"value_model", "value_model_revision", "value_architecture", "value_mem_fraction_static"}
    )

    revision: LenvmRevision | None = None
    """Generation of the fork that is installed; null: unknown, and requests that depend on it are refused."""
    value_model: str | None = None
    """Value model that the server loads for guidance: a directory, a repository, or the size of a published one
    (``qwen2.5-0.5b``, ``qwen2.5-1.5b``); null: a server that cannot guide."""
    value_model_revision: str | None = None
    """Revision of the value model's repository."""
    value_architecture: (
        Literal["Qwen2ForLengthValueModel", "Qwen3ForLengthValueModel", "Qwen2_5_VLForLengthValueModel"] | None
    ) = None
    """Class that loads the value model; null: by its backbone."""
    value_mem_fraction_static: Share | None = None
    """Share of the device's memory for the value model and its cache, beside ``mem_fraction_static``."""
    guided_fn: str = "sglang.srt.lvm.lvm_guided_sampling:lvm_combined_guidance"
    """Function that tilts, as ``module:function``."""
    stride: StepCount = 1
    """Guide every n-th step of a request, if the revision can (``LENVM_STRIDE``)."""
    synchronised_timing_interval: StepCount | None = None
    """Calls of the sampler between two lines of averages in the log of a V2 server, which waits for the device
    around every section for their sake and becomes slower; null: none."""

    @model_validator(mode="after")
    def _of_one_revision(self) -> "SglangLenvmOptions":
        if self.stride != 1 and self.revision not in _REVISIONS_WITH_STRIDES:
            raise ValueError(
                f"stride is {self.stride} with revision {self.revision}; only some commits of V1 and V3 know "
                "strides: set revision, or leave stride out"
            )
        if self.synchronised_timing_interval is not None and self.revision != "V2":
            raise ValueError(
                f"synchronised_timing_interval is {self.synchronised_timing_interval} with revision "
                f"{self.revision}; only V2 prints averages: set revision: V2, or leave it out"
            )
        return self

    @property
    def skips_neutral_guidance(self) -> bool:
        return self.revision in REVISIONS_THAT_SKIP

    @property
    def guides_with(self) -> str | None:
        return self.value_model
