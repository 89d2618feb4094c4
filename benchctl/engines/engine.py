"""The contract between an engine and ``measure``, and the values that pass between the two."""

import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from benchctl.engines.hub import context_of
from benchctl.errors import EngineUnavailableError, UnsupportedError
from benchctl.profile.engine_options import ServerOptions
from benchctl.profile.engine_spec import load_name
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.model import VariantSettings
from benchctl.profile.sections import RequestOptions
from benchctl.records.files import encode
from benchctl.records.record import Call, PreparedRequest
from benchctl.records.schema import Clock, ResultWarning, StepPhase, StepRecord
from benchctl.untrusted import PROMPT_TOKENS
from benchctl.workload.tokenizers import Chat

PostJson: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Posts an object to a path of a server and gets the object that it answers; empty where it refuses."""


class PromptCounter(Protocol):
    """One kind of server's way to count the tokens of a prompt without computing it."""

    async def count_text(self, post: PostJson, text: str) -> int | None:
        """Tokens of ``text`` as the prompt of a completion; None where the server does not say."""

    async def count_chat(self, post: PostJson, chat: Chat) -> int | None:
        """Tokens of ``chat``, with those of the model's template; None where the server does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCounter:
    """``POST /tokenize`` as vLLM defines it, which SGLang and the simulator take over.

    SGLang counts chats since 2026, and refuses them before. As no model is named, a server of several counts with
    its first.
    """

    chat_template_kwargs: Mapping[str, Any] | None = None

    async def count_text(self, post: PostJson, text: str) -> int | None:
        """One question. A server adds its special tokens to the prompt of a completion."""
        return await self._count(post, {"prompt": text, "add_special_tokens": True})

    async def count_chat(self, post: PostJson, chat: Chat) -> int | None:
        """One question. A template writes its special tokens itself."""
        body: dict[str, Any] = {"messages": chat, "add_generation_prompt": True, "add_special_tokens": False}
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = self.chat_template_kwargs
        return await self._count(post, body)

    async def _count(self, post: PostJson, body: Mapping[str, Any]) -> int | None:
        count = (await post("/tokenize", body)).get("count")
        return count if type(count) is int and 0 <= count <= PROMPT_TOKENS else None


if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSite:
    """The site of one server: its port, the directory of its run, and the seed of its own variation."""

    port: int
    directory: Path
    noise_seed: int = 0

    @property
    def step_log(self) -> Path:
        """The file to which the server, or our code inside it, writes its steps."""
        return raw_step_log(self.directory)

    @property
    def description(self) -> Path:
        """The file to which our code inside the server writes its configuration, as one JSON object."""
        return self.directory / "server.json"


def raw_step_log(directory: Path) -> Path:
    """The engine's own step log in the directory of a run."""
    return directory / "steps.raw.jsonl"


def phase_of(prefill_tokens: int, decode_tokens: int) -> StepPhase:
    """The phase of a step that computes these tokens."""
    if not prefill_tokens:
        return "decode"
    return "mixed" if decode_tokens else "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The cause of a failure that the end of a server's log shows.

    ``cause`` is a short class such as ``out-of-memory``; ``remedy`` one sentence that says what happened and what
    to do. With ``is_profile_error`` no run of this variant can succeed until the profile is corrected. With
    ``is_final`` the server may live on although it will never serve.
    """

    cause: str
    remedy: str
    is_profile_error: bool = False
    is_final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A text in a log that identifies a failure, and its diagnosis."""

    text: str
    diagnosis: Diagnosis


def signatures(
    cause: str, remedy: str, *texts: str, is_profile_error: bool = False, is_final: bool = False
) -> tuple[Signature, ...]:
    """Signatures of one kind of failure: each of ``texts`` identifies it. See ``Diagnosis`` for the rest."""
    diagnosis = Diagnosis(cause=cause, remedy=remedy, is_profile_error=is_profile_error, is_final=is_final)
    return tuple(Signature(text=text, diagnosis=diagnosis) for text in texts)


def profile_errors(cause: str, remedy: str, *texts: str) -> tuple[Signature, ...]:
    """Signatures of a failure that only a corrected profile can avoid."""
    return signatures(cause, remedy, *texts, is_profile_error=True)


def diagnosed(signatures: Iterable[Signature], log_tail: str) -> Diagnosis | None:
    """The first signature, in the order given, that the end of a log shows."""
    return next((signature.diagnosis for signature in signatures if signature.text in log_tail), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """An engine as it is installed on this machine."""

    program: Path
    """Interpreter of its environment, or the program itself."""
    version: str | None
    """None where the program cannot be started."""
    is_python: bool = True
    """True if ``program`` is an interpreter."""
    torch: str | None = None
    """Version of torch in its environment."""
    missing_packages: tuple[str, ...] = ()
    """Packages without which it does not start."""


class Engine(Protocol):
    """One kind of server software."""

    @property
    def kind(self) -> str:
        """Its name in profiles."""

    @property
    def clock(self) -> Clock:
        """The clock of its steps."""

    @property
    def is_launched(self) -> bool:
        """True where benchctl starts and ends its servers, false where someone else does."""

    @property
    def needs_first_generation(self) -> bool:
        """True where it answers its health path before it can generate."""

    @property
    def essential_processes(self) -> tuple[str, ...]:
        """Parts of the titles of processes, besides the first one, without which a server cannot go on."""

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when no such server can be started here."""

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError when the engine cannot do what these requests or settings ask."""

    def health_path(self, settings: VariantSettings) -> str:
        """Answers 200 when the server is up."""

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """Path of its counters in Prometheus format; None for an engine without any."""

    def base_url(self, settings: VariantSettings, port: int) -> str:
        """Address of the server."""

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """The command line of the server."""

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """Variables of the server's environment beyond ours."""

    def time_scale(self, settings: VariantSettings) -> float:
        """Seconds of the engine's clock per wall second."""

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> Call:
        """Ask for ``request`` as this variant does."""

    def prompt_counter(self, settings: VariantSettings) -> PromptCounter | None:
        """Counts prompts as this variant's servers do, by asking one; None where they cannot be asked."""

    async def announce(
        self,
        client: "httpx.AsyncClient",
        requests: Sequence[PreparedRequest],
        *,
        max_concurrency: int | None,
        is_warmup: bool,
    ) -> None:
        """Prepare the server for a phase: the warm-up or the load."""

    async def effective_config(
        self, client: "httpx.AsyncClient", settings: VariantSettings, site: LaunchSite
    ) -> dict[str, Any]:
        """The configuration that the server reports, flat; ``version`` is that of the engine."""

    async def after_load_warnings(self, client: "httpx.AsyncClient") -> tuple[ResultWarning, ...]:
        """Warnings of the server about its own numbers."""

    def has_steps(self, settings: VariantSettings) -> bool:
        """True where a run of these settings records steps."""

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        """The steps of a run in their order, from the files that the server left in its directory."""

    def diagnose(self, log_tail: str) -> Diagnosis | None:
        """The cause of a failure that the end of the server's log shows; None where it shows none."""

    def build(self, settings: VariantSettings) -> Mapping[str, str]:
        """Versions of what a server of these settings runs, by package, as far as they can change a number.

        Empty where they are unknown, as those of a server that someone else started.
        """

    def installation(self, options: ServerOptions | None) -> Installation | None:
        """The installation that the options name; None where nothing has to be installed.

        Raises EngineUnavailableError when it is not there.
        """


def engine_for(kind: str) -> Engine:
    """The engine of a kind, loaded when it is needed. Raises EngineUnavailableError for an unknown kind."""
    if kind not in ENGINES:
        raise EngineUnavailableError(f"unknown engine {kind!r}; choose one of {', '.join(ENGINES)}")
    engine: Engine = load_name(ENGINES[kind].implementation)()
    return engine


if TYPE_CHECKING:
    import httpx

LOOPBACK: Final = "127.0.0.1"
_SALT_BYTES: Final = 16
JsonGetter = Callable[[str], Awaitable[dict[str, Any]]]
"""Gets the JSON object at a path of a server; an empty one where the server does not offer it."""
OptionsT = TypeVar("OptionsT", bound=ServerOptions)


class OpenAiServer:
    """The behaviour that such servers share; each engine overrides the rest."""

    kind: str
    clock: Clock = "host"
    is_launched: bool = True
    needs_first_generation: bool = True
    essential_processes: tuple[str, ...] = ()
    signatures: tuple[Signature, ...] = ()
    """Texts in its log that give the cause of a failure away, the special ones first."""

    def check_available(self, settings: VariantSettings) -> None:
        """Nothing to check before a start."""

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for guidance, and for variables of a chat template without chats."""
        check_chats(requests, settings)
        if settings.guidance is not None:
            raise self.refusal(settings, "loads no value model", "measure guidance on a guided engine")

    def health_path(self, settings: VariantSettings) -> str:
        return "/health"

    def metrics_path(self, settings: VariantSettings) -> str | None:
        return "/metrics"

    def base_url(self, settings: VariantSettings, port: int) -> str:
        return f"http://{LOOPBACK}:{port}"

    def time_scale(self, settings: VariantSettings) -> float:
        return 1.0

    def prompt_counter(self, settings: VariantSettings) -> PromptCounter | None:
        """None: OpenAI's API has no path that counts a prompt without an answer to it."""
        return None

    async def announce(
        self,
        client: "httpx.AsyncClient",
        requests: Sequence[PreparedRequest],
        *,
        max_concurrency: int | None,
        is_warmup: bool,
    ) -> None:
        """Nothing to prepare: such servers take requests as they come."""

    async def after_load_warnings(self, client: "httpx.AsyncClient") -> tuple[ResultWarning, ...]:
        """None: such servers do not report problems of their own."""
        return ()

    async def attached_config(self, get_json: JsonGetter) -> dict[str, Any]:
        """The configuration of a server that someone else started, as far as it can be asked over HTTP."""
        models = (await get_json("/v1/models")).get("data")
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        config = {"served_model": first.get("id"), "model_path": first.get("root")}
        return config | {"max_model_len": first.get("max_model_len")}

    def config_of_metrics(self, series: Collection[str]) -> dict[str, Any]:
        """None: a page of counters states no configuration."""
        return {}

    def uncached_fields(self) -> dict[str, Any]:
        """None: OpenAI's API has no way to keep a server from using its cache."""
        return {}

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        return dict(getattr(settings.server, "env", {}))

    def has_steps(self, settings: VariantSettings) -> bool:
        return False

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        """None: such servers do not record steps unless something of ours runs inside them."""
        return iter(())

    def diagnose(self, log_tail: str) -> Diagnosis | None:
        return diagnosed(self.signatures, log_tail)

    def build(self, settings: VariantSettings) -> Mapping[str, str]:
        """Nothing is known of it."""
        return {}

    def installation(self, options: ServerOptions | None) -> Installation | None:
        """None: nothing has to be installed."""
        return None

    def require_context(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError where prompt and output of a request exceed the server's context."""
        limit = getattr(settings.server, "max_model_len", None) or context_of(settings.model)
        longest = max((request.prompt_tokens + request.max_tokens for request in requests), default=0)
        if limit is not None and longest > limit:
            what = f"refuses prompt and output of more than {limit} tokens together, and a request needs {longest}"
            raise self.refusal(settings, what, "lower workload.output_len, or raise engine.options.max_model_len")

    def refusal(self, settings: VariantSettings, what: str, remedy: str) -> UnsupportedError:
        """The refusal of what a server cannot do; ``what`` continues "the server"."""
        return UnsupportedError(f"engine {self.kind!r}, variant {settings.variant!r}: the server {what}; {remedy}")


def own_options(settings: VariantSettings, options_class: type[OptionsT]) -> OptionsT:
    """The server's options as an engine's own class; TypeError, a programming error, for another engine's."""
    if not isinstance(settings.server, options_class):
        raise TypeError(f"expected {options_class.__name__}, got {type(settings.server).__name__}")
    return settings.server


def plain_body(request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
    """The fields of a request that such servers share, except prompt and length."""
    return {
        "model": settings.server.request_model or settings.model,
        "n": request.n,
        "seed": request.seed,
        "ignore_eos": request.ignore_eos,
        **settings.sampling.stated(),
        "stream_options": {"include_usage": True},
    }


def streamed(
    request: PreparedRequest,
    settings: VariantSettings,
    body: Mapping[str, Any],
    *,
    form: Mapping[str, Any] | None = None,
) -> Call:
    """``request`` as a streamed completion, or chat completion where it has messages, with these fields.

    The fields and headers that the profile asks for go over them. ``form`` is the profile's form of the answer as
    the server spells it; None: as OpenAI and vLLM do.
    """
    options, is_chat = settings.request, request.messages is not None
    fields: dict[str, Any] = {**body, **(plain_form(options) if form is None else form)}
    if options.model is not None:
        fields["model"] = options.model
    if is_chat and options.chat_template_kwargs is not None:
        fields["chat_template_kwargs"] = options.chat_template_kwargs
    fields |= {**options.extra_body, "max_tokens": request.max_tokens, "stream": True}
    fields |= {"messages": request.messages} if is_chat else {"prompt": request.prompt}
    headers, key_values = options.sent_headers()
    return Call(
        request=request,
        path="/v1/chat/completions" if is_chat else "/v1/completions",
        headers={"X-Request-Id": request.request_id, **headers},
        body=encode(fields),
        secrets=key_values,
    )


def salted() -> dict[str, Any]:
    """A field that no other request ever has had, so that the server's prefix cache knows nothing of its prompt."""
    return {"cache_salt": secrets.token_hex(_SALT_BYTES)}


def plain_form(options: RequestOptions) -> dict[str, Any]:
    """The form of the answer that a profile asks for, in the fields of OpenAI and vLLM."""
    form = {"response_format": options.response_format, "structured_outputs": options.structured_outputs}
    return {name: value for name, value in form.items() if value is not None}


def check_chats(requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
    """Raises UnsupportedError for variables of a chat template in requests that use none."""
    if settings.request.chat_template_kwargs is None:
        return
    if any(request.messages is None for request in requests):
        raise UnsupportedError(
            f"variant {settings.variant!r}: request.chat_template_kwargs is set, and the requests are plain "
            "prompts, which no chat template renders; choose a data set of chats, or leave it out"
        )


def plugged_in(own: Mapping[str, str], directory: Path, name: str, *, allowed_in: str) -> dict[str, str]:
    """The environment ``own``, extended so that the server loads our plugin ``name`` from ``directory``.

    ``allowed_in`` is the variable that lists the plugins that the engine may load; it stays unset where it was,
    which allows all.
    """
    env = {**own, "PYTHONPATH": _prepend(str(directory), _inherited(own, "PYTHONPATH"), os.pathsep)}
    if (allowed := _inherited(own, allowed_in)) is not None:
        env[allowed_in] = _prepend(name, allowed, ",")
    return env


def _inherited(own: Mapping[str, str], name: str) -> str | None:
    return own.get(name, os.environ.get(name))


def _prepend(added: str, rest: str | None, separator: str) -> str:
    return f"{added}{separator}{rest}" if rest else added
