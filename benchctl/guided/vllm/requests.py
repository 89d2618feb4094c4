"""Requests to vLLM that ask for guidance, the filters top_k, top_p and min_p that it takes over, and V1's rows.

A request asks by keys of ``vllm_xargs``: ``lenvm_`` before the names of ``parameter_table``
(``lenvm_value_scale``, ``lenvm_mode``...). Keys without the prefix are ignored.

Guidance chooses among the tokens that temperature and filters leave. vLLM applies its filters last, so on a guided
request they would cut the guided distribution once more. They are therefore moved, when a request comes in, from
vLLM's own parameters to ``lenvm_top_k``, ``lenvm_top_p`` and ``lenvm_min_p``, and vLLM's are left open. Clients
send ``top_p`` as usual. Requests that are never guided (greedy, or at a scale that changes nothing) keep vLLM's.

vLLM does not report names of requests, so each row that comes gets a number of its own. A request that was
preempted comes back as a new row, with the output that it had.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, overload

from benchctl.guided.params import VLLM_PREFIX as PREFIX, GuidanceError, GuidanceParams, check_top_k, parse_params
from benchctl.guided.rows import GREEDY_TEMPERATURE, GuideRow

_OPEN: Final[Mapping[str, tuple[float, ...]]] = {"top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,)}
"""Values of vLLM's filters that filter nothing; the first is what an open one is set to."""
_MOVED_KEYS: Final = frozenset(PREFIX + name for name in _OPEN)


def asks_for_guidance(sampling: Any) -> bool:
    """True for a request with any key of ours."""
    return bool(sampling.extra_args) and any(key.startswith(PREFIX) for key in sampling.extra_args or ())


def admit(sampling: Any, max_candidates: int) -> None:
    """Check a request as it comes in, and take over its filters; a second call changes nothing.

    Raises GuidanceError for anything invalid, whether it would have had an effect or not.
    """
    if not asks_for_guidance(sampling):
        return
    own, filters = _split(sampling)
    params = parse_params(own)
    # vLLM opens the filters of greedy requests.
    if params is not None and sampling.temperature > GREEDY_TEMPERATURE:
        check_top_k(params, int(filters["top_k"]), max_candidates)
    is_ours = (
        params is not None
        and sampling.temperature > GREEDY_TEMPERATURE
        and filters["top_k"] != 1
        and not (params.skip_noop and params.is_neutral)
    )
    extra = {key: value for key, value in (sampling.extra_args or {}).items() if key not in _MOVED_KEYS}
    if is_ours:
        extra |= {PREFIX + name: value for name, value in filters.items()}
    sampling.extra_args = extra
    for name, value in filters.items():
        kind = int if name == "top_k" else float
        setattr(sampling, name, kind(_OPEN[name][0] if is_ours else value))


def guided_request(sampling: Any) -> GuideRow | None:
    """An admitted request that may be guided, as a row that has no place and no tokens yet; None for any other."""
    if not sampling.extra_args or f"{PREFIX}top_k" not in sampling.extra_args:
        return None
    own, filters = _split(sampling)
    params = parse_params(own)
    if params is None:
        return None
    return GuideRow(
        index=-1,
        key=None,
        params=params,
        tokens=(),
        num_prompt=0,
        temperature=sampling.temperature,
        top_k=int(filters["top_k"]),
        top_p=filters["top_p"],
        min_p=filters["min_p"],
        draws_candidates=True,
    )


def _split(sampling: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Keys of guidance without their prefix, and the filters, wherever they are written."""
    own = {
        key.removeprefix(PREFIX): value
        for key, value in (sampling.extra_args or {}).items()
        if key.startswith(PREFIX)
    }
    filters: dict[str, float] = {}
    for name, opened in _OPEN.items():
        native = getattr(sampling, name)
        if name not in own:
            filters[name] = native
            continue
        filters[name] = _filter(name, own.pop(name))
        if native not in opened and native != filters[name]:
            raise GuidanceError(
                f"guidance: {name} is {native!r} and {PREFIX}{name} is {filters[name]!r}; give one of the two"
            )
    return own, filters


def _filter(name: str, value: object) -> float:
    limits = {"top_k": (-1, float("inf")), "top_p": (0, 1), "min_p": (0, 1)}[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not limits[0] <= float(value) <= limits[1] or (name == "top_p" and not value):  # type: ignore[arg-type]
        raise GuidanceError(f"guidance: {PREFIX}{name} is {value!r}; give what {name} itself may be")
    if name == "top_k" and float(value) != int(value):  # type: ignore[call-overload,arg-type]
        raise GuidanceError(f"guidance: {PREFIX}{name} is {value!r}; give a whole number")
    return value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Batch:
    """The guided rows of one step."""

    in_order: list[GuideRow]
    """Ordered by row of the batch."""
    batch_size: int
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
        row = guided_request(sampling)
        if row is not None:
            self._by_index[index] = replace(
                row,
                index=index,
                key=next(self._numbers),
                params=row.params if prompt else _UNSCORED,
                tokens=Tokens(prompt or [], output),
                num_prompt=len(prompt or []),
                temperature=1.0,  # vLLM has divided by the request's own before it calls us
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
