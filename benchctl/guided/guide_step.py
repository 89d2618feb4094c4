"""Counts of guidance in one step, some of which only the device knows at first.

The step itself does not wait for them: they reach the host by a copy of their own, and the log asks whether they
have arrived.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from benchctl.guided.transfer import Arriving


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideStep:
    """Counts of guidance in one step, by the names of step records."""

    guided_rows: int = 0
    candidates: int = 0
    """Of the guided rows."""
    value_prefill_tokens: int = 0
    value_extend_tokens: int = 0
    value_reuse_tokens: int = 0
    """Output tokens that were taken over from the candidates of an earlier step."""
    value_replayed: bool | None = None
    """True if the pass that scored repeated a recorded one; None where none ran or passes are not recorded."""
    value_recordings: int | None = None
    """Passes that were recorded in this step, because their sizes had not been foreseen; None as above."""
    fused: bool | None = None
    """True if prefixes were extended and candidates scored in one forward pass; None if nothing was scored."""


class PendingStep:
    """Counts of a step, some of which the device may still be computing."""

    def __init__(self, counted: GuideStep, counts: Arriving | None = None) -> None:
        """``counts`` are the numbers of candidates of the rows, 0 in those that are not guided."""
        self._counted, self._counts = counted, counts

    @property
    def is_known(self) -> bool:
        return self._counts is None or self._counts.is_here

    @property
    def step(self) -> GuideStep:
        """The counts; waits for the device if necessary."""
        if self._counts is None:
            return self._counted
        counts = self._counts.read()
        return replace(self._counted, guided_rows=sum(count > 0 for count in counts), candidates=sum(counts))

    def fields(self) -> Mapping[str, int | bool | None]:
        return asdict(self.step)
