"""A simulated server in virtual time that takes the requests of a profile: no process, no HTTP, no waiting."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Sequence as Items
from itertools import pairwise
from operator import sub
from typing import Final

import msgspec

from benchctl.engines.engine import own_options
from benchctl.engines.sim.engine import SimEngine
from benchctl.engines.sim.options import SimOptions
from benchctl.errors import UsageError
from benchctl.profile.choices import COST_MODELS
from benchctl.profile.model import Arrival, VariantSettings
from benchctl.records.record import ChoiceRecord, PreparedRequest, RequestError, RequestRecord
from benchctl.records.schema import StepRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, ServedChoice, ServedRequest, serve
from benchctl.sim.http.api import ChatBody, CompletionBody, request_from
from benchctl.sim.requests import Request, static_prefixes
from benchctl.sim.simulate import SimLoad, engine_for_config
from benchctl.workload.arrival import launch_offsets_ns


def config_of(settings: VariantSettings, *, noise_seed: int = 0) -> SimConfig:
    """The configuration of the server that these settings start."""
    options = own_options(settings, SimOptions).model_dump(exclude={"port"})
    return SimConfig(model=settings.model, noise_seed=noise_seed, **options)


def core_request(request: PreparedRequest, settings: VariantSettings, config: SimConfig) -> Request:
    """The request as the server reads it. Raises UsageError where the server refuses it."""
    kind: type[ChatBody | CompletionBody] = ChatBody if request.messages is not None else CompletionBody
    fields = settings.request.model_copy(update={"headers": {}})  # nothing is sent
    call = SimEngine().request_call(request, settings.model_copy(update={"request": fields}))
    body: ChatBody | CompletionBody = msgspec.json.decode(call.body, type=kind)
    if body.model not in {None, config.model}:
        raise UsageError(f"the model {body.model!r} does not exist; this server has {config.model!r}")
    return request_from(body, request.request_id, config)


def costs_in_words(settings: VariantSettings) -> str:
    """The source of the step times: ``cost model roofline (llama-3.1-8b on h100-sxm)``."""
    options = own_options(settings, SimOptions)
    if not COST_MODELS[options.cost_model].uses_shapes:
        return f"cost model {options.cost_model}"
    return f"cost model {options.cost_model} ({settings.model} on {options.hardware})"


_OK: Final = 200
_BAD_REQUEST: Final = 400


def record_of(
    served: ServedRequest, prepared: PreparedRequest, config: SimConfig, *, is_warmup: bool, is_open_loop: bool
) -> RequestRecord:
    """The record of a request that was served; only an open loop plans a send for a time without a slot."""
    choices = tuple(_choice_record(choice, config) for choice in served.choices)
    first = served.choices[0].sequence
    return RequestRecord(
        request_id=prepared.request_id,
        index=prepared.index,
        is_warmup=is_warmup,
        scheduled_ns=served.planned_ns if is_open_loop else served.sent_ns,
        slot_free_ns=served.slot_free_ns,
        sent_ns=served.sent_ns,
        done_ns=served.end_ns,
        status=_OK,
        choices=choices,
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(len(choice.token_ns) for choice in served.choices),
        cached_tokens=first.num_cached if config.has_cache else None,
        natural_tokens=prepared.natural_tokens,
    )


def refusal_record(
    prepared: PreparedRequest, reason: UsageError, planned_ns: int, *, is_warmup: bool
) -> RequestRecord:
    """The record of a request that the server refuses as it comes in."""
    return RequestRecord(
        request_id=prepared.request_id,
        index=prepared.index,
        is_warmup=is_warmup,
        scheduled_ns=planned_ns,
        sent_ns=planned_ns,
        done_ns=planned_ns,
        status=_BAD_REQUEST,
        natural_tokens=prepared.natural_tokens,
        error=RequestError(kind="http-status", message=str(reason), status=_BAD_REQUEST),
    )


def _choice_record(choice: ServedChoice, config: SimConfig) -> ChoiceRecord:
    """A chunk for every ``tokens_per_chunk`` tokens, with all that one step has given.

    The rest comes with the event that ends the choice.
    """
    answer, token_ns = choice.sequence.answer, choice.token_ns
    texts = [answer.token_text(position) for position in range(len(token_ns))]
    sizes, chars, chunk_ns = [1] * len(texts), [len(text) for text in texts], token_ns
    if config.tokens_per_chunk > 1 or config.num_speculative_tokens:
        ends = chunk_ends(token_ns, config.tokens_per_chunk)
        chunks = [texts[start:end] for start, end in pairwise((0, *ends))]
        sizes, chars = [len(chunk) for chunk in chunks], [sum(map(len, chunk)) for chunk in chunks]
        chunk_ns = [token_ns[end - 1] for end in ends]
        if sizes[-1] < config.tokens_per_chunk:
            chunk_ns[-1] = choice.end_ns
    return ChoiceRecord(
        index=choice.sequence.choice,
        chunk_ns=tuple(chunk_ns),
        chunk_tokens=tuple(sizes),
        chunk_chars=tuple(chars),
        output_tokens=len(token_ns),
        finish_reason=answer.finish_reason,
        text="".join(texts),
    )


def chunk_ends(token_ns: Sequence[int], tokens_per_chunk: int) -> list[int]:
    """Tokens of an answer until the end of each chunk: a step sends all if that many wait, or if it is the last.

    Tokens of one step have one time.
    """
    ends = [end for end, (time_ns, next_ns) in enumerate(pairwise((*token_ns, -1)), start=1) if next_ns != time_ns]
    sent, chunks = 0, []
    for end in ends:
        if end - sent >= tokens_per_chunk or end == len(token_ns):
            chunks.append(end)
            sent = end
    return chunks


_BURST: Final = Arrival(kind="burst")


class VirtualServer:
    """One server life. ``on_step`` gets each step as it ends.

    Raises UsageError at its start where the simulator cannot serve these settings.
    """

    def __init__(
        self, settings: VariantSettings, *, noise_seed: int = 0, on_step: Callable[[StepRecord], None]
    ) -> None:
        self.config: Final = config_of(settings, noise_seed=noise_seed)
        if self.config.cached_prompts is not None:  # a file that cannot be read is no refusal of requests
            static_prefixes(self.config.cached_prompts, self.config.cached_prompt_tokens)
        self._settings: Final = settings
        self._core: Final = Core(engine_for_config(self.config))
        self._on_step: Final = on_step

    @property
    def now_ns(self) -> int:
        return self._core.engine.now_ns

    def send_burst(self, requests: Items[PreparedRequest]) -> Iterator[RequestRecord]:
        """Serve requests of the warm-up that are sent at once; yields each record as its request ends."""
        return self._send(requests, _BURST, is_warmup=True)

    def send_load(self, requests: Items[PreparedRequest], arrival: Arrival) -> Iterator[RequestRecord]:
        """Serve the load on its schedule; yields each record as its request ends."""
        return self._send(requests, arrival, is_warmup=False)

    def _send(
        self, requests: Items[PreparedRequest], arrival: Arrival, *, is_warmup: bool
    ) -> Iterator[RequestRecord]:
        servable: dict[str, tuple[PreparedRequest, Request]] = {}
        for prepared in requests:
            try:
                servable[prepared.request_id] = prepared, self.check_servable(prepared)
            except UsageError as error:
                yield refusal_record(prepared, error, self.now_ns + prepared.arrival_ns, is_warmup=is_warmup)
        planned_ns = [prepared.arrival_ns for prepared, _ in servable.values()]
        launches_ns = launch_offsets_ns(planned_ns, arrival.launch_rate_limit)
        held_ns = dict(zip(servable, map(sub, launches_ns, planned_ns), strict=True))
        load = SimLoad(
            requests=tuple(request for _, request in servable.values()),
            arrival_ns=launches_ns,
            max_concurrency=arrival.max_concurrency,
            is_warmup=is_warmup,
        )
        for served in serve(self._core, load, self._on_step):
            prepared, _ = servable[served.request_id]
            record = record_of(
                served, prepared, self.config, is_warmup=is_warmup, is_open_loop=arrival.is_open_loop
            )
            if arrival.is_open_loop:  # planned before the limit held it back
                record = msgspec.structs.replace(
                    record, scheduled_ns=record.scheduled_ns - held_ns[served.request_id]
                )
            yield record

    def check_servable(self, prepared: PreparedRequest) -> Request:
        """The request in the words of the core. Raises UsageError where it would be refused."""
        request = core_request(prepared, self._settings, self.config)
        self._core.engine.check_servable(request)
        return request
