"""The server that ``benchctl speculation`` computes with, from the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchctl.errors import UsageError

if TYPE_CHECKING:
    from benchctl.records.record import ResultWarning
    from benchctl.steptime.source import StepTimeSource
    from benchctl.steptime.speculation.law import DraftCost
    from benchctl.steptime.speculation.server_steps import Backfill, ServerSteps
    from benchctl.steptime.work import Deployment

DEFAULT_DRAFT_COST: Final = 0.05
"""One draft pass as a share of a step, where nothing states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """The costs of drafts that the command line names: constants, or a model and a way to compute backfills."""

    model: str | None
    cost: float | None
    """One draft pass as a share of the target's step; None for ``DEFAULT_DRAFT_COST``."""
    backfill: "Backfill"
    backfill_cost: float

    def __post_init__(self) -> None:
        if self.cost is not None and self.model is not None:
            raise UsageError("--draft-cost and --draft-model both state the cost of a draft; give one of them")

    def constant(self) -> "DraftCost":
        """The stated costs. Raises UsageError for one that is negative or not finite."""
        from benchctl.steptime.speculation.law import DraftCost

        draft = DEFAULT_DRAFT_COST if self.cost is None else self.cost
        return DraftCost(draft=draft, backfill=self.backfill_cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The model, the device and the step times that the command line names."""

    model: str
    hardware: str | None
    tensor_parallel: int
    fitted: Path | None
    context: int
    """Tokens of a sequence in the cache."""

    def deployment(self, model: str) -> "Deployment":
        """A model on the devices of the server. Raises UsageError without a device."""
        from benchctl.costs.hardware import hardware_for
        from benchctl.costs.shapes import shape_for
        from benchctl.records.stores.peaks_store import resolved_hardware
        from benchctl.steptime.model_file import read_model
        from benchctl.steptime.work import Deployment

        hardware = self.hardware
        if hardware is None and self.fitted is not None:
            hardware = read_model(self.fitted).hardware
        if hardware is None:
            raise UsageError("--model needs a device: name it with --hardware, such as h100-sxm or cpu:1.5:80")
        return Deployment(
            shape=shape_for(model),
            hardware=hardware_for(resolved_hardware(hardware)),
            tensor_parallel=self.tensor_parallel,
        )

    def source(self, deployment: "Deployment") -> "StepTimeSource":
        """Step times of a deployment, from the fitted model or the roofline."""
        from benchctl.steptime.model_file import read_model
        from benchctl.steptime.source import fitted_source, roofline_source

        if self.fitted is not None:
            return fitted_source(read_model(self.fitted), deployment)
        return roofline_source(deployment)

    def draft_warnings(self, num_draft_tokens: int) -> "tuple[ResultWarning, ...]":
        """The warning that the fitted model does not know what verifying so many draft tokens takes, or none."""
        from benchctl.analysis.step_time.fitted_drafts import fitted_draft_warnings
        from benchctl.steptime.model_file import read_model

        if self.fitted is None:
            return ()
        return fitted_draft_warnings(read_model(self.fitted), str(self.fitted), num_draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Step times of target and draft, and their origin in words."""

    steps: "ServerSteps"
    origin: str
    cost: "DraftCost"
    """One draft pass of a single sequence as a share of the target's step, without backfill."""
    memory_rows: int | None


def build_server(options: ServerOptions, drafts: DraftOptions) -> Server:
    """The server of the options; a draft without a model costs a share of the target's step."""
    from benchctl.steptime.speculation.law import DraftCost
    from benchctl.steptime.speculation.served import rows_that_fit
    from benchctl.steptime.speculation.server_steps import ServerSteps, as_share
    from benchctl.steptime.work import one_step

    if drafts.backfill_cost:
        raise UsageError("--backfill-cost is a constant; with --model, --backfill prices it by step times")
    target, context = options.deployment(options.model), float(options.context)
    source = options.source(target)
    if drafts.model is None:
        cost = drafts.constant().draft
        draft, draft_s = None, as_share(source.step_s, cost)
        origin = f"{source.words}, a draft pass at {cost:.4g} of a step"
    else:
        draft = options.deployment(drafts.model)
        draft_s = options.source(draft).step_s
        origin = f"{source.words}, drafts by {draft.shape.name}"
        single = one_step(num_decodes=1, context=context)
        cost = draft_s(single) / source.step_s(single)
    return Server(
        steps=ServerSteps(target_s=source.step_s, draft_s=draft_s, context=context, backfill=drafts.backfill),
        origin=f"{origin}, {context:.0f} tokens in the cache of each sequence",
        cost=DraftCost(draft=cost),
        memory_rows=rows_that_fit(target, draft, context),
    )
