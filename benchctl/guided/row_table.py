"""The rows of a step as the host knows them before their logits exist: one vector, one copy to the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from benchctl.guided.candidates import limit_numbers
from benchctl.guided.modes import NUM_MODE_NUMBERS, ModeBatch, mode_numbers, rules_of
from benchctl.guided.operations.sampling import NUM_LIMITS
from benchctl.guided.params import GuidanceParams
from benchctl.guided.transfer import to_device


class TableRow(Protocol):
    """A row of the batch; see ``guide.GuideRow``."""

    @property
    def index(self) -> int: ...
    @property
    def params(self) -> GuidanceParams: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def is_server_filtering(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RowTable:
    """B rows of a step on the device."""

    index: Tensor
    """int64 [B]: the row of the logits."""
    lines: Tensor
    """int64 [B]: the number of a row among those that are due, -1 in others."""
    limits: Tensor
    """[B, 7], see ``operations.sampling``."""
    modes: ModeBatch


def row_table(rows: Sequence[TableRow], due: Sequence[bool], device: torch.device) -> RowTable:
    """``due`` tells which rows may be guided in this step."""
    numbers = [(*_limits(row, is_due=is_due), *_modes(row)) for row, is_due in zip(rows, due, strict=True)]
    is_due = np.asarray(due, dtype=bool)
    lines = np.where(is_due, np.cumsum(is_due) - 1, -1)
    floats = np.asarray(numbers, dtype=np.float64)
    # Both kinds of numbers have eight bytes, so that they can travel together.
    whole = np.column_stack([[row.index for row in rows], lines]).astype(np.int64)
    packed = torch.from_numpy(np.concatenate([whole.T.ravel(), floats.ravel().view(np.int64)]))
    index, lines_there, rest = to_device(packed, device).split((len(rows), len(rows), floats.size))
    table = rest.view(torch.float64).view(len(rows), NUM_LIMITS + NUM_MODE_NUMBERS)
    limits, modes = table.split((NUM_LIMITS, NUM_MODE_NUMBERS), dim=1)
    return RowTable(index, lines_there, limits, ModeBatch(modes, rules_of(row.params for row in rows)))


def _limits(row: TableRow, *, is_due: bool) -> tuple[float, ...]:
    return limit_numbers(
        temperature=row.temperature,
        top_k=row.top_k,
        top_p=row.top_p,
        min_p=row.min_p,
        threshold=row.params.value_entropy_threshold,
        is_due=is_due,
        is_ours=not row.is_server_filtering,
    )


def _modes(row: TableRow) -> tuple[float, ...]:
    return mode_numbers(row.params, len(row.tokens) - row.num_prompt)
