"""Options of speculative decoding: the source of drafts, and what the options of the simulator exclude."""

from dataclasses import dataclass
from typing import Any, Protocol

from benchctl.profile.choices import COST_MODELS, CostModelChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """The source of a server's drafts.

    Without ``model`` and ``problem`` they are looked up in text, which takes no pass of a model.
    """

    model: str | None = None
    """Name or directory of the model whose passes are drafts."""
    problem: str | None = None
    """The reason why no such model can be named."""
    has_backfill: bool = True
    """The model also forwards the last of its drafts, where all of them were accepted and a bonus token follows."""


class DraftOptions(Protocol):
    """The options that are checked together."""

    @property
    def num_speculative_tokens(self) -> int: ...
    @property
    def acceptance(self) -> float | tuple[float, ...] | None: ...
    @property
    def acceptance_spread(self) -> float: ...
    @property
    def draft_model(self) -> str | None: ...
    @property
    def draft_cost(self) -> float | None: ...
    @property
    def cost_model(self) -> str: ...
    @property
    def value_model(self) -> str | None: ...


def acceptance_by_position(acceptance: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """The acceptances that an option names; a single one holds for every position."""
    if acceptance is None:
        return ()
    return acceptance if isinstance(acceptance, tuple) else (acceptance,)


def option_text(value: Any) -> Any:
    """The value of an option as a flag takes it and a server tells it: a list as text, with commas."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def drafting_error(options: DraftOptions) -> tuple[str, str] | None:
    """The first option that cannot be as it is, and the reason; None where all fit together."""
    num_drafts, acceptance = options.num_speculative_tokens, acceptance_by_position(options.acceptance)
    if num_drafts < 0:
        return "num_speculative_tokens", f"is {num_drafts}; it must not be negative"
    for probability in acceptance:
        if not 0 <= probability <= 1:
            return "acceptance", f"has {probability:g}; it is a probability from 0 to 1"
    if not 0 <= options.acceptance_spread <= 1:
        return "acceptance_spread", f"is {options.acceptance_spread:g}; it is a share from 0 to 1"
    if options.draft_cost is not None and not 0 <= options.draft_cost < float("inf"):
        return "draft_cost", f"is {options.draft_cost:g}; it is a share of the model's own step, 0 or more"
    return _speculation_error(options, acceptance) if num_drafts else None


def _speculation_error(options: DraftOptions, acceptance: tuple[float, ...]) -> tuple[str, str] | None:
    num_drafts, choice = options.num_speculative_tokens, COST_MODELS[options.cost_model]
    if options.value_model is not None:
        return "num_speculative_tokens", (
            f"is {num_drafts}, and value_model is {options.value_model}: a value model guides one token at a time "
            "and cannot score drafts; drop either"
        )
    if not choice.verifies_drafts:
        return "cost_model", f"{options.cost_model} cannot price the verification of drafts; take {_able()}"
    if not acceptance:
        return "num_speculative_tokens", f"is {num_drafts}; state with acceptance how many drafts are accepted"
    if 1 < len(acceptance) < num_drafts:
        return "acceptance", (
            f"has {len(acceptance)} positions for {num_drafts} draft tokens; give one for each, or one number for "
            "all"
        )
    return _draft_price_error(options, choice)


def _draft_price_error(options: DraftOptions, choice: CostModelChoice) -> tuple[str, str] | None:
    if (options.draft_model is None) == (options.draft_cost is None):
        return "num_speculative_tokens", (
            f"is {options.num_speculative_tokens}; name either draft_model, whose passes the cost model prices, or "
            "draft_cost, their share of the model's own step"
        )
    if options.draft_model is not None and not choice.prices_other_models:
        return "draft_model", (
            f"is {options.draft_model}, and {options.cost_model} has the times of one model; give draft_cost "
            "instead"
        )
    return None


def _able() -> str:
    return " or ".join(name for name, choice in COST_MODELS.items() if choice.verifies_drafts)
