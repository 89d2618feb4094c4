"""Requests known by their lengths alone, each made when it is asked for: a trace of millions needs no objects."""

from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final, overload

from benchctl.errors import UsageError
from benchctl.sim.requests.request import Prompt, Request, SamplingParams

_SAMPLING: Final = SamplingParams()


class CountedRequests(Sequence[Request]):
    """Request i has ``prompt_tokens[i]`` tokens of its own and an answer of exactly ``output_tokens[i]``.

    Sampling and guidance are those of ``template``.
    """

    def __init__(
        self,
        prompt_tokens: Iterable[int],
        output_tokens: Iterable[int],
        prefix: str = "r",
        *,
        template: Request | None = None,
    ) -> None:
        self._sampling = _SAMPLING if template is None else template.sampling
        self._guidance = None if template is None else template.guidance
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
        return Request(
            request_id=f"{self._prefix}{index}",
            prompt=_prompt(self._prompt_tokens[index]),
            max_tokens=self._output_tokens[index],
            seed=index,
            ignore_eos=True,
            sampling=self._sampling,
            guidance=self._guidance,
        )


@cache
def _prompt(num_tokens: int) -> Prompt:
    """A prompt without text: all of a length are the same."""
    return Prompt(num_tokens=num_tokens, digest=str(num_tokens), asks_for_box=False, block_hashes=())
