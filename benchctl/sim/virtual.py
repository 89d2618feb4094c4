"""A simulated server in virtual time that takes the requests of a profile: no process, no HTTP, no waiting."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence as Items
from itertools import accumulate, chain
from typing import Any, Final

import msgspec

from benchctl.engines.engine import own_options
from benchctl.engines.sim.engine import SimEngine
from benchctl.engines.sim.options import COST_MODELS, SimOptions
from benchctl.errors import UsageError
from benchctl.profile.arrival import Arrival, launch_offsets_ns
from benchctl.profile.model import VariantSettings
from benchctl.records.record import ChoiceRecord, PreparedRequest, RequestError, RequestRecord
from benchctl.records.schema import StepRecord
from benchctl.sim.config import SimConfig
from benchctl.sim.core import Core, Phase, SimLoad
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.http.api import ChatBody, CompletionBody, request_from
from benchctl.sim.requests import Request, static_prefixes
from benchctl.sim.sequences import Sequence, SequenceStatus
from benchctl.workload.turns import thinks_before, with_answers_in

_BAD_REQUEST: Final = 400
_AT_ONCE: Final = Arrival(kind="burst")


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


class VirtualServer:
    """One server life. ``on_step`` gets each step as it ends.

    The steps are those that the server logs when the same phases are announced and sent over HTTP. Raises
    UsageError at its start where the simulator cannot serve these settings.
    """

    def __init__(
        self, settings: VariantSettings, *, noise_seed: int = 0, on_step: Callable[[StepRecord], None]
    ) -> None:
        self.config: Final = config_of(settings, noise_seed=noise_seed)
        if self.config.cached_prompts is not None:  # a file that cannot be read is no refusal of requests
            static_prefixes(self.config.cached_prompts, self.config.cached_prompt_tokens)
        self.settings = settings
        """Those by which requests are read from now on; the server stays what it is."""
        self._core: Final = Core(SimulatedEngine(self.config))
        self._on_step: Final = on_step

    @property
    def now_ns(self) -> int:
        return self._core.engine.now_ns

    def check_servable(self, prepared: PreparedRequest) -> Request:
        """The request in the words of the core. Raises UsageError where it would be refused."""
        request = core_request(prepared, self.settings, self.config)
        self._core.engine.check_servable(request)
        return request

    def send(
        self, requests: Items[PreparedRequest], schedule: Arrival | None = None, num_warmups: int = 0
    ) -> Iterator[RequestRecord]:
        """Serve the load on its schedule, or without one a burst of the warm-up; yields each record at its end.

        The first ``num_warmups`` of a load are warm-up, too.
        """
        num_warmups = len(requests) if schedule is None else num_warmups
        arrival, num_opening = schedule or _AT_ONCE, num_warmups
        servable: list[tuple[PreparedRequest, Request | None]] = []
        for number, prepared in enumerate(requests):
            try:
                servable.append((prepared, self.check_servable(prepared) if prepared.turn is None else None))
            except UsageError as error:
                is_warmup = number < num_warmups
                num_opening -= is_warmup
                yield _refusal_record(prepared, error, self.now_ns + prepared.arrival_ns, is_warmup=is_warmup)
        offsets_ns = launch_offsets_ns((prepared.arrival_ns for prepared, _ in servable), arrival.launch_rate_limit)
        entering = _Entering(self, servable)
        load = SimLoad(
            requests=entering,
            arrival_ns=offsets_ns,
            max_concurrency=arrival.max_concurrency,
            is_warmup=schedule is None,
            num_warmups=num_opening,
            thinks_ns=thinks_before(prepared for prepared, _ in servable),
        )
        for choices in self._serve(load):
            first = choices[0].sequence
            index, planned_ns, slot_free_ns = first.entry
            prepared, _ = servable[index]
            # Only an open loop plans a send for a time without a slot, and before the limit held it back.
            sent_ns = planned_ns if slot_free_ns is None else slot_free_ns
            held_ns = offsets_ns[index] - prepared.arrival_ns
            record = RequestRecord(
                request_id=prepared.request_id,
                index=prepared.index,
                is_warmup=index < num_opening,
                scheduled_ns=planned_ns - held_ns if arrival.is_open_loop else sent_ns,
                slot_free_ns=slot_free_ns,
                sent_ns=sent_ns,
                done_ns=self.now_ns,
                status=200,
                choices=tuple(choice.record() for choice in choices),
                prompt_tokens=first.prompt_tokens,
                completion_tokens=sum(choice.num_sent for choice in choices),
                cached_tokens=first.num_cached if self.config.has_cache else None,
                natural_tokens=prepared.natural_tokens,
                turn=prepared.turn,
            )
            if prepared.turn is not None:
                entering.answers[prepared.session].append(record.choices[0].text)
            yield record
        yield from entering.refused

    def _serve(self, load: SimLoad) -> Iterator[list["_Choice"]]:
        """Serve one phase to its end; yields the choices of each request as it ends."""
        core, tokens_per_chunk = self._core, self.config.tokens_per_chunk
        core.announce(Phase(load))
        choices: dict[str, dict[int, _Choice]] = {}
        while (output := core.next_step()) is not None:
            self._on_step(output.record)
            for seq in chain(output.emitted, output.finished):
                of_request = choices.setdefault(seq.request.request_id, {})
                choice = of_request.get(seq.choice)
                if choice is None:
                    choice = of_request[seq.choice] = _Choice(seq)
                choice.advance(core.engine.now_ns, tokens_per_chunk)
            for request_id in output.finished_requests:
                yield [choice for _, choice in sorted(choices.pop(request_id).items())]


class _Entering(Items[Request | None]):
    """The requests of a load as they enter: a turn of a conversation is made of what was said before it."""

    def __init__(self, server: VirtualServer, servable: Items[tuple[PreparedRequest, Request | None]]) -> None:
        self.answers: Final = defaultdict[str | None, list[str]](list)
        """The answers of each conversation; to a refused turn an empty one."""
        self.refused: Final[list[RequestRecord]] = []
        """Records of refused turns."""
        self._server, self._servable = server, servable

    def __len__(self) -> int:
        return len(self._servable)

    def __getitem__(self, index: Any) -> Any:
        prepared, request = self._servable[index]
        if prepared.turn is None:
            return request
        try:
            return self._server.check_servable(with_answers_in(prepared, self.answers[prepared.session]))
        except UsageError as error:
            self.answers[prepared.session].append("")
            self.refused.append(_refusal_record(prepared, error, self._server.now_ns, is_warmup=False))
            return None


class _Choice:
    """The chunks of one choice that a client has got: one for every ``tokens_per_chunk`` tokens, with all that one
    step has given. The rest comes with the event that ends the choice.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence: Final = sequence
        self.num_sent = 0
        self._chunk_ns: Final[list[int]] = []
        self._chunk_tokens: Final[list[int]] = []

    def advance(self, now_ns: int, tokens_per_chunk: int) -> None:
        """Send what has gathered, if it fills a chunk or is the last."""
        num_new = self.sequence.num_output - self.num_sent
        has_ended = self.sequence.status is SequenceStatus.FINISHED
        if num_new and (num_new >= tokens_per_chunk or has_ended):
            self._chunk_ns.append(now_ns)
            self._chunk_tokens.append(num_new)
            self.num_sent += num_new

    def record(self) -> ChoiceRecord:
        answer = self.sequence.answer
        texts = [answer.token_text(position) for position in range(self.num_sent)]
        ends = accumulate(self._chunk_tokens)
        chars = [sum(map(len, texts[end - size : end])) for size, end in zip(self._chunk_tokens, ends, strict=True)]
        return ChoiceRecord(
            index=self.sequence.choice,
            chunk_ns=tuple(self._chunk_ns),
            chunk_tokens=tuple(self._chunk_tokens),
            chunk_chars=tuple(chars),
            output_tokens=self.num_sent,
            finish_reason=answer.finish_reason,
            text="".join(texts),
        )


def _refusal_record(
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
        turn=prepared.turn,
        error=RequestError(kind="http-status", message=str(reason), status=_BAD_REQUEST),
    )


def check_simulated(arms: Iterable[VariantSettings], requests: Items[PreparedRequest]) -> None:
    """Start the server of each arm in virtual time, and show it the request that needs least room.

    Raises UsageError where a server cannot start, or refuses this request and with it all others.
    """
    shortest = min(requests, key=lambda request: request.prompt_tokens + request.max_tokens)
    for settings in arms:
        server = VirtualServer(settings, on_step=lambda _step: None)
        try:
            server.check_servable(shortest)
        except UsageError as error:
            raise UsageError(
                f"engine 'sim', variant {settings.variant!r}: every request would be refused: {error}"
            ) from error
