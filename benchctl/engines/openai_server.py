"""The common base of engines whose servers speak OpenAI's API: reached by HTTP, timed by the host's clock."""

import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from benchctl.engines.engine import Diagnosis, Installation, LaunchSite, RequestCall, Signature, diagnosed
from benchctl.engines.hub import context_of
from benchctl.engines.prompt_counter import PromptCounter
from benchctl.errors import UnsupportedError
from benchctl.profile.engine_options import ServerOptions
from benchctl.profile.model import VariantSettings
from benchctl.profile.sections import RequestOptions
from benchctl.records.files import encode
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import Clock, ResultWarning, StepRecord

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
) -> RequestCall:
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
    return RequestCall(
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
