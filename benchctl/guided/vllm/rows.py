"""The guided rows of vLLM's batch and their requests, from the changes that vLLM reports.

vLLM does not report names of requests, so each row that comes gets a number of its own. A request that was
preempted comes back as a new row, with the output that it had.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Protocol, overload

from benchctl.guided.params import GuidanceParams
from benchctl.guided.rows import GuideRow
from benchctl.guided.vllm.requests import guided_request


class Batch(Protocol):
    """The rows to be guided in a step."""

    @property
    def in_order(self) -> list[GuideRow]:
        """Ordered by row of the batch."""

    @property
    def batch_size(self) -> int:
        """Of all rows, guided or not."""


class Tokens(Sequence[int]):
    """Prompt and output of a request as one sequence, which grows with the output."""

    __slots__ = ("_output", "_prompt")

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._prompt, self._output = prompt, output

    def __len__(self) -> int:
        return len(self._prompt) + len(self._output)

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        num_prompt = len(self._prompt)
        if isinstance(position, slice):
            start, stop, step = position.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            if start >= num_prompt:
                return list(self._output[start - num_prompt : max(stop, start) - num_prompt])
            return [*self._prompt[start:stop], *self._output[: max(stop - num_prompt, 0)]]
        index = position + len(self) if position < 0 else position
        if not 0 <= index < len(self):
            raise IndexError(f"position {position} of {len(self)} tokens")
        return self._prompt[index] if index < num_prompt else self._output[index - num_prompt]


_UNSCORED = GuidanceParams(value_scale=0.0)
"""Of a row whose filters are applied here and whose prompt has no tokens that a value model could read."""


class Rows:
    """The guided rows of the batch as it is now."""

    def __init__(self) -> None:
        self._by_index: dict[int, GuideRow] = {}
        self._numbers: Iterator[int] = count()
        self._in_order: list[GuideRow] | None = []
        self.batch_size = 0

    def __bool__(self) -> bool:
        return bool(self._by_index)

    @property
    def in_order(self) -> list[GuideRow]:
        if self._in_order is None:
            self._in_order = [self._by_index[index] for index in sorted(self._by_index)]
        return self._in_order

    def update(self, update: Any) -> list[int]:
        """Follow vLLM's ``BatchUpdate``, in the order removed, added, moved; the keys of rows that are gone."""
        self.batch_size = update.batch_size
        gone: list[int] = []
        for index in update.removed:
            self._drop(index, gone)
        for index, sampling, prompt, output in update.added:
            self._drop(index, gone)
            self._add(index, sampling, prompt, output)
        for source, target, direction in update.moved:
            self._move(source, target, gone, is_swap=direction.name == "SWAP")
        self._in_order = None
        return gone

    def _drop(self, index: int, gone: list[int]) -> None:
        if (row := self._by_index.pop(index, None)) is not None:
            gone.append(row.key)  # type: ignore[arg-type]

    def _add(self, index: int, sampling: Any, prompt: list[int] | None, output: list[int]) -> None:
        request = guided_request(sampling)
        if request is None:
            return
        self._by_index[index] = GuideRow(
            index=index,
            key=next(self._numbers),
            params=request.params if prompt else _UNSCORED,
            tokens=Tokens(prompt or [], output),
            num_prompt=len(prompt or []),
            temperature=1.0,  # vLLM has divided by the request's own before it calls us
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            draws_candidates=True,
        )

    def _move(self, source: int, target: int, gone: list[int], *, is_swap: bool) -> None:
        moved, displaced = self._by_index.pop(source, None), self._by_index.pop(target, None)
        if moved is not None:
            self._by_index[target] = replace(moved, index=target)
        if displaced is None:
            return
        if is_swap:
            self._by_index[source] = replace(displaced, index=source)
        else:
            gone.append(displaced.key)  # type: ignore[arg-type]
