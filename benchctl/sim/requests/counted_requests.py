"""Requests known by their lengths alone, each made when it is asked for: a trace of millions needs no objects."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, overload

from benchctl.errors import UsageError
from benchctl.sim.requests.request import Prompt, Request, SamplingParams

_SAMPLING: Final = SamplingParams()


class CountedRequests(Sequence[Request]):
    """Request i has ``prompt_tokens[i]`` tokens of its own and an answer of exactly ``output_tokens[i]``."""

    def __init__(self, prompt_tokens: Iterable[int], output_tokens: Iterable[int], prefix: str = "r") -> None:
        self._prompt_tokens = array("q", prompt_tokens)
        self._output_tokens = array("q", output_tokens)
        self._prefix = prefix
        if len(self._prompt_tokens) != len(self._output_tokens):
            raise UsageError(
                f"{len(self._prompt_tokens)} prompt lengths for {len(self._output_tokens)} output lengths; "
                "give one of each for every request"
            )

    def __len__(self) -> int:
        return len(self._prompt_tokens)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Request, ...]: ...
    def __getitem__(self, index: int | slice) -> Request | tuple[Request, ...]:
        if isinstance(index, slice):
            return tuple(map(self.__getitem__, range(len(self))[index]))
        name = f"{self._prefix}{index}"
        prompt = Prompt(num_tokens=self._prompt_tokens[index], digest=name, asks_for_box=False, block_hashes=())
        return Request(
            request_id=name,
            prompt=prompt,
            max_tokens=self._output_tokens[index],
            ignore_eos=True,
            sampling=_SAMPLING,
        )
