"""The engine: one kind of server software, and the values that pass between it and ``measure``.

An engine says how its servers are started, addressed and read, and what their log shows when they fail. It starts
nothing and keeps no state; ``measure`` owns processes, sockets and files. All servers speak OpenAI's API over HTTP:
``Engine`` is the behaviour that they share, and each engine overrides what is its own.
"""

import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from benchctl.errors import EngineUnavailableError, UnsupportedError
from benchctl.profile.choices import ServerOptions
from benchctl.profile.engine_table import ENGINES, EngineSpec, load_name
from benchctl.profile.model import VariantSettings
from benchctl.records.files import encode, read_jsonl
from benchctl.records.record import Call, PreparedRequest
from benchctl.records.schema import Clock, ResultWarning, StepPhase, StepRecord
from benchctl.untrusted import PROMPT_TOKENS
from benchctl.untrusted.text import visible_line
from benchctl.workload.tokenizers import Chat

if TYPE_CHECKING:
    import httpx

LOOPBACK: Final = "127.0.0.1"
Device: TypeAlias = Literal["cpu", "cuda"]
OptionsT = TypeVar("OptionsT", bound=ServerOptions)
Client: TypeAlias = "httpx.AsyncClient"
PostJson: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Posts an object to a path of a server and gets the object that it answers; empty where it refuses."""


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
    def log(self) -> Path:
        """The output of the server while it lives."""
        return self.directory / "server.raw.log"

    @property
    def description(self) -> Path:
        """The file to which our code inside the server writes its configuration, as one JSON object."""
        return self.directory / "server.json"


def raw_step_log(directory: Path) -> Path:
    """The engine's own step log in the directory of a run."""
    return directory / "steps.raw.jsonl"


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


Signature: TypeAlias = tuple[str, Diagnosis]
"""A text in a log that identifies a failure, and its diagnosis."""


def signatures(
    cause: str, remedy: str, *texts: str, is_profile_error: bool = False, is_final: bool = False
) -> tuple[Signature, ...]:
    """Signatures of one kind of failure: each of ``texts`` identifies it. See ``Diagnosis`` for the rest."""
    diagnosis = Diagnosis(cause=cause, remedy=remedy, is_profile_error=is_profile_error, is_final=is_final)
    return tuple((text, diagnosis) for text in texts)


def profile_errors(cause: str, remedy: str, *texts: str) -> tuple[Signature, ...]:
    """Signatures of a failure that only a corrected profile can avoid."""
    return signatures(cause, remedy, *texts, is_profile_error=True)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The packages of one engine on one kind of device, and the proof that they work."""

    kind: str
    """Name of the engine, and of its environment."""
    device: Device
    pins: tuple[str, ...]
    """Packages with their versions, as pip takes them."""
    unwanted: tuple[str, ...] = ()
    """Packages that come along and must not stay."""
    cost: str
    """Time and space that an installation takes, in words."""
    proof: str
    """Python code that fails in the environment unless the engine works."""
    finish: tuple[str, ...] = ()
    """Python code that completes the environment after pip, and its arguments."""
    build_env: Mapping[str, str] = field(default_factory=dict)
    """Variables of pip's environment beside ours."""

    @property
    def content(self) -> str:
        """The content of the environment in words, which is left in it as a stamp."""
        without = f", without {' '.join(self.unwanted)}" if self.unwanted else ""
        return f"{self.device}: {' '.join(self.pins)}{without}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounter:
    """Counts the tokens of prompts by asking a server: ``POST /tokenize`` as vLLM defines it.

    SGLang and the simulator take that over. SGLang counts chats since 2026, and refuses them before. As no model is
    named, a server of several counts with its first.
    """

    chat_template_kwargs: Mapping[str, Any] | None = None

    async def count_text(self, post: PostJson, text: str) -> int | None:
        """Tokens of ``text`` as the prompt of a completion; None where the server does not say."""
        return await self._count(post, {"prompt": text, "add_special_tokens": True})

    async def count_chat(self, post: PostJson, chat: Chat) -> int | None:
        """Tokens of ``chat``, with those of the model's template; None where the server does not say."""
        return await self._count(
            post,
            {
                "messages": chat,
                "add_generation_prompt": True,
                "add_special_tokens": False,
                **self.template_fields,
            },
        )

    @property
    def template_fields(self) -> dict[str, Any]:
        """The variables of the chat template, as a field of a question."""
        return {"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}

    async def _count(self, post: PostJson, body: Mapping[str, Any]) -> int | None:
        count = (await post("/tokenize", body)).get("count")
        return count if type(count) is int and 0 <= count <= PROMPT_TOKENS else None


class Engine:
    """One kind of server software."""

    kind: str
    """Its name in profiles, by which ``spec`` is found."""
    is_launched: bool = True
    """True where benchctl starts and ends its servers."""
    needs_first_generation: bool = True
    """True where it answers its health path before it can generate."""
    essential_processes: tuple[str, ...] = ()
    """Parts of the titles of processes, besides the first one, without which a server cannot go on."""
    signatures: tuple[Signature, ...] = ()
    """Texts in its log that give the cause of a failure away, the special ones first."""
    once_patterns: tuple[re.Pattern[str], ...] = (re.compile(r"(torch\._dynamo hit config\.\w+)"),)
    """What its log says at the first use of a shape, of work that is done once; the first group names it."""
    counter: type[PromptCounter] | None = None
    """Asks its servers to count prompts; None where they cannot be asked."""

    @property
    def spec(self) -> EngineSpec:
        """The facts about it that need no code."""
        return ENGINES[self.kind]

    @property
    def clock(self) -> Clock:
        """The clock of its steps."""
        return "virtual" if self.spec.is_virtual else "host"

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when no such server can be started here."""

    def check_requests(self, requests: Iterable[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError when the engine cannot do what these requests or settings ask.

        Here: for variables of a chat template without chats, and for guidance on an engine that cannot guide.
        """
        if settings.request.chat_template_kwargs is not None and any(each.messages is None for each in requests):
            raise UnsupportedError(
                f"variant {settings.variant!r}: request.chat_template_kwargs is set, and the requests are plain "
                "prompts, which no chat template renders; choose a data set of chats, or leave it out"
            )
        if settings.guidance is not None and not self.spec.guides:
            raise self.refusal(settings, "loads no value model", "measure guidance on a guided engine")

    def health_path(self, settings: VariantSettings) -> str:
        """Answers 200 when the server is up."""
        return "/health"

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """Path of its counters in Prometheus format; None for an engine without any."""
        return "/metrics"

    def base_url(self, settings: VariantSettings, port: int) -> str:
        """Address of the server."""
        return f"http://{LOOPBACK}:{port}"

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """The command line of the server; empty where nothing is started."""
        return ()

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """Variables of the server's environment beyond ours."""
        return dict(getattr(settings.server, "env", {}))

    def time_scale(self, settings: VariantSettings) -> float:
        """Seconds of the engine's clock per wall second."""
        return 1.0

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> Call:
        """``request`` as this variant asks it."""
        headers, key_values = settings.request.sent_headers()
        return Call(
            request=request,
            path="/v1/completions" if request.messages is None else "/v1/chat/completions",
            headers={"X-Request-Id": request.request_id, **headers},
            body=encode(self.request_fields(request, settings)),
            secrets=key_values,
        )

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        """The fields of the body of that call."""
        raise NotImplementedError

    def salted(self, settings: VariantSettings) -> VariantSettings:
        """The settings with a new salt, whose prompts a prefix cache finds among each other and nowhere else.

        As they are for an engine that takes none.
        """
        if self.spec.cache_bypass != "cache_salt":
            return settings
        fields = {"extra_body": settings.request.extra_body | uncached_fields(self.spec)}
        return settings.model_copy(update={"request": settings.request.model_copy(update=fields)})

    def prompt_counter(self, settings: VariantSettings) -> PromptCounter | None:
        """Counts prompts as this variant's servers do, by asking one; None where they cannot be asked."""
        return self.counter(chat_template_kwargs=settings.request.chat_template_kwargs) if self.counter else None

    async def announce(
        self,
        client: Client,
        requests: Sequence[PreparedRequest],
        *,
        max_concurrency: int | None,
        is_warmup: bool,
        num_warmups: int = 0,
    ) -> None:
        """Prepare the server for a phase: the warm-up, or the load, whose first ``num_warmups`` are warm-up."""

    async def effective_config(self, client: Client, settings: VariantSettings, site: LaunchSite) -> dict[str, Any]:
        """The configuration that the server reports, flat; ``version`` is that of the engine."""
        return {}

    async def attached_config(self, client: Client, headers: Mapping[str, str]) -> dict[str, Any]:
        """The same of a server that someone else started, as far as it can be asked with these headers."""
        models = (await offered_json(client, "/v1/models", headers)).get("data")
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        return {
            "served_model": first.get("id"),
            "model_path": first.get("root"),
            "max_model_len": first.get("max_model_len"),
        }

    async def after_load_warnings(self, client: Client) -> tuple[ResultWarning, ...]:
        """Warnings of the server about its own numbers."""
        return ()

    def has_steps(self, settings: VariantSettings) -> bool:
        """True where a run of these settings records steps."""
        return False

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        """The steps of a run in their order, from the files that the server left in its directory.

        Here: as the server, or our code inside it, wrote them. Raises RecordError at the first damaged line.
        """
        return read_jsonl(raw_step_log(directory), StepRecord)

    def diagnose(self, log_tail: str) -> Diagnosis | None:
        """The cause of a failure that the end of the server's log shows; None where it shows none."""
        return next((diagnosis for text, diagnosis in self.signatures if text in log_tail), None)

    def first_uses(self, log: str) -> tuple[str, ...]:
        """The shapes that this part of the log says were met for the first time, each once."""
        names = (match[1] for pattern in self.once_patterns for match in pattern.finditer(log))
        return tuple(dict.fromkeys(visible_line(name, 120) for name in names))

    def build(self, settings: VariantSettings) -> Mapping[str, str]:
        """Versions of what a server of these settings runs, by package, as far as they can change a number.

        Empty where they are unknown, as those of a server that someone else started.
        """
        return {}

    def installation(self, options: ServerOptions | None) -> Installation | None:
        """The installation that the options name; None where nothing has to be installed.

        Raises EngineUnavailableError when it is not there.
        """
        return None

    def recipe(self, device: Device) -> Recipe | None:
        """The packages that ``benchctl engines install`` installs for a device; None where it installs none.

        Raises EngineUnavailableError for a device that it does not run on.
        """
        return None

    def refusal(self, settings: VariantSettings, what: str, remedy: str) -> UnsupportedError:
        """The refusal of what a server cannot do; ``what`` continues "the server"."""
        return UnsupportedError(f"engine {self.kind!r}, variant {settings.variant!r}: the server {what}; {remedy}")


def engine_for(kind: str) -> Engine:
    """The engine of a kind, loaded when it is needed. Raises EngineUnavailableError for an unknown kind."""
    if kind not in ENGINES:
        raise EngineUnavailableError(f"unknown engine {kind!r}; choose one of {', '.join(ENGINES)}")
    engine: Engine = load_name(ENGINES[kind].implementation)()
    return engine


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
) -> dict[str, Any]:
    """The fields of ``request`` as a streamed completion, or chat completion where it has messages, with ``body``.

    The fields that the profile asks for go over that. ``form`` is the profile's form of the answer as the server
    spells it; None: as OpenAI and vLLM do.
    """
    options, is_chat = settings.request, request.messages is not None
    plain_form = {"response_format": options.response_format, "structured_outputs": options.structured_outputs}
    if form is None:
        form = {name: value for name, value in plain_form.items() if value is not None}
    fields: dict[str, Any] = {**body, **form}
    if options.model is not None:
        fields["model"] = options.model
    if is_chat and options.chat_template_kwargs is not None:
        fields["chat_template_kwargs"] = options.chat_template_kwargs
    fields |= {**options.extra_body, "max_tokens": request.max_tokens, "stream": True}
    return fields | ({"messages": request.messages} if is_chat else {"prompt": request.prompt})


def uncached_fields(spec: EngineSpec) -> dict[str, Any]:
    """Fields of one request that keep its prompt from being found in a cache; empty where none do.

    A salt is one that no other request ever has had, so that the server's prefix cache knows nothing of the prompt.
    """
    match spec.cache_bypass:
        case "cache_salt":
            return {"cache_salt": secrets.token_hex(16)}
        case "cache_prompt":
            return {"cache_prompt": False}
        case None:
            return {}


async def get_json(client: Client, path: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON object at a path of a server. Raises httpx.HTTPError where it does not answer with one."""
    from benchctl.untrusted.http import fetch_json  # noqa: PLC0415 - options of engines are read without a server

    return await fetch_json(client, path, headers)


async def offered_json(client: Client, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """The same; empty where the server does not offer it."""
    from httpx import HTTPError  # noqa: PLC0415 - as above

    try:
        return await get_json(client, path, headers)
    except HTTPError:
        return {}


async def offered_text(client: Client, path: str, headers: Mapping[str, str]) -> str:
    """The text at a path of a server; empty where it does not offer one."""
    from httpx import HTTPError  # noqa: PLC0415 - as above

    from benchctl.untrusted.http import fetch  # noqa: PLC0415 - as above

    try:
        return (await fetch(client, "GET", path, headers=headers)).raise_for_status().text
    except HTTPError:
        return ""


def phase_of(prefill_tokens: int, decode_tokens: int) -> StepPhase:
    """The phase of a step that computes these tokens."""
    if not prefill_tokens:
        return "decode"
    return "mixed" if decode_tokens else "prefill"


def plugged_in(own: Mapping[str, str], directory: Path, name: str, *, allowed_in: str) -> dict[str, str]:
    """The environment ``own``, extended so that the server loads our plugin ``name`` from ``directory``.

    ``allowed_in`` is the variable that lists the plugins that the engine may load; it stays unset where it was,
    which allows all.
    """
    inherited = {**os.environ, **own}
    path = filter(None, (str(directory), inherited.get("PYTHONPATH")))
    env = {**own, "PYTHONPATH": os.pathsep.join(path)}
    if (allowed := inherited.get(allowed_in)) is not None:
        env[allowed_in] = ",".join(filter(None, (name, allowed)))
    return env
