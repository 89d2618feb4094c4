"""The decision to wait for the numbers of candidates, which keeps rows without a choice from the value model.

Rows that have one candidate, or are certain enough, need no values, but only the device knows which they are. To
ask it is to wait for the base model, while nothing is launched behind it. Not to ask is to compute values that
change nothing. Which is cheaper depends on how many such rows there are, and neighbouring steps are alike in that.
"""

from collections import deque
from typing import Final

from benchctl.guided.transfer import Arriving

WORTH_WAITING: Final = 0.25
"""Share of rows without a choice from which waiting is worth it: the wait leaves a device idle for about a quarter
of what a pass of the value model takes."""
_AGE: Final = 2
"""Steps after which counts are looked at: by then they have arrived, and a decision never depends on how soon."""


class Skipping:
    """Decides for each step; ``is_on`` None by the share of rows without a choice two steps ago."""

    def __init__(self, is_on: bool | None) -> None:
        self._is_on = is_on
        self._steps: deque[tuple[int, int | Arriving]] = deque(maxlen=_AGE)

    def is_worth_it(self) -> bool:
        """True to wait in the step that comes now."""
        if self._is_on is not None:
            return self._is_on
        if len(self._steps) < _AGE:
            return False
        num_due, open_rows = self._steps[0]
        num_open = open_rows if isinstance(open_rows, int) else sum(count > 0 for count in open_rows.read())
        return num_due - num_open >= WORTH_WAITING * num_due

    def note(self, num_due: int, open_rows: int | Arriving) -> None:
        """Note how many of the due rows of this step had a choice, or the numbers of candidates that will tell."""
        if self._is_on is None and num_due:
            self._steps.append((num_due, open_rows))
