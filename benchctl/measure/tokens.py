"""The tokenizer of an experiment's prompts: read from files, or asked of a server."""

import asyncio
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import httpx

from benchctl.engines.engine import Engine, LaunchSite, PromptCounter, engine_for
from benchctl.engines.hub import repository_of
from benchctl.errors import ServerStartError, UsageError
from benchctl.load.control import control_client
from benchctl.measure.interrupt import run_interruptible
from benchctl.measure.redaction import server_env
from benchctl.measure.server.process import choose_port
from benchctl.measure.server.server import Launch, ServerProcess
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, variant_settings
from benchctl.profile.sections import Timeouts
from benchctl.records.files import encode
from benchctl.records.record import ESTIMATE, SERVER, Message, PreparedRequest
from benchctl.records.schema import ResultWarning
from benchctl.untrusted.http import fetch, json_object
from benchctl.workload.prepare import PreparedSet, prepare_requests
from benchctl.workload.tokenizers import (
    KEY,
    Chat,
    Estimate,
    LocalTokenizer,
    Tokenizer,
    directory_named,
    directory_on_disk,
)

_LIMIT_S: Final = 60.0
"""Time for one answer: a server tokenizes in milliseconds, but may be busy with others' requests."""
_SHOWN_CHARS: Final = 40
_PROBE: Final = "a"
Prompt: TypeAlias = str | tuple[Message, ...]
OpenServer: TypeAlias = Callable[[], AbstractContextManager[str]]
"""Brings a server up, if it is not, and gives its address until its context ends."""


class ServerTokenizer:
    """Counts as one server does, and as ``otherwise`` does where the server cannot be asked.

    The server is brought up for the first prompt that has to be counted and let go at the end of the context; the
    counts stay, so that a prompt is asked for once.
    """

    def __init__(
        self,
        counter: PromptCounter,
        open_server: OpenServer,
        headers: Mapping[str, str],
        timeouts: Timeouts,
        otherwise: Tokenizer,
    ) -> None:
        self._counter, self._headers, self._timeouts = counter, headers, timeouts
        self._open_server, self._otherwise = open_server, otherwise
        self._stack = ExitStack()
        self._url: str | None = None
        self._is_asked = True
        """False once the server has refused."""
        self._counts: dict[Prompt, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._url = None
        self._stack.close()

    @property
    def source(self) -> str:
        """``server``, or the source of the other one after a refusal."""
        return SERVER if self._is_asked else self._otherwise.source

    def count_texts(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokens of each text. Raises UsageError for one that a server refuses which counts others."""
        return self._count(tuple(texts), _PROBE) or self._otherwise.count_texts(texts)

    def count_chats(self, chats: Sequence[Chat]) -> tuple[int, ...]:
        """Tokens of each chat. Raises UsageError for one that a server refuses which counts others."""
        return self._count(
            tuple(map(tuple, chats)), (Message(role="user", content=_PROBE),)
        ) or self._otherwise.count_chats(chats)

    def _count(self, prompts: Sequence[Prompt], probe: Prompt) -> tuple[int, ...]:
        """The counts; empty where the server cannot be asked."""
        unknown = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._counts]
        if unknown and self._is_asked:
            if self._url is None:
                self._url = self._stack.enter_context(self._open_server())
            run_interruptible(self._ask_all(self._url, probe, unknown))
        return tuple(self._counts[prompt] for prompt in prompts) if self._is_asked else ()

    async def _ask_all(self, url: str, probe: Prompt, prompts: Sequence[Prompt]) -> None:
        async with control_client(url, self._timeouts) as client:
            if await self._ask(client, probe) is None:
                self._is_asked = False
                return
            rest = iter(prompts)
            await asyncio.gather(*(self._ask_in_turn(client, rest) for _ in range(32)))

    async def _ask_in_turn(self, client: httpx.AsyncClient, rest: Iterable[Prompt]) -> None:
        for prompt in rest:
            count = await self._ask(client, prompt)
            if count is None:
                text = prompt if isinstance(prompt, str) else " ".join(message.content for message in prompt)
                raise UsageError(
                    f"{client.base_url} counts others, but not the prompt that begins {text[:_SHOWN_CHARS]!r}; ask "
                    "its owner, or name a tokenizer in workload.tokenizer"
                )
            self._counts[prompt] = count

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt) -> int | None:
        async def post(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
            headers = {**self._headers, "Content-Type": "application/json"}
            try:
                response = await fetch(
                    client, "POST", path, content=encode(body), headers=headers, limit_s=_LIMIT_S
                )
                return json_object(response)
            except (httpx.HTTPError, OSError):
                return {}

        if isinstance(prompt, str):
            return await self._counter.count_text(post, prompt)
        return await self._counter.count_chat(post, prompt)


def question_headers(engine: Engine, settings: VariantSettings) -> dict[str, str]:
    """The headers that requests of a variant carry, such as a key, but for that which names a request."""
    headers = engine.request_call(
        PreparedRequest(
            request_id="", index=0, arrival_ns=0, prompt=_PROBE, prompt_tokens=1, max_tokens=1, seed=0, source=""
        ),
        settings,
    ).headers
    return {name: value for name, value in headers.items() if name.lower() != "x-request-id"}


def tokenizer_for(
    profile: Profile, on_start: Callable[[str], None] = lambda _text: None
) -> AbstractContextManager[Tokenizer]:
    """The tokenizer of the baseline's model. Inside the context it may hold a server; it can be entered again.

    ``on_start`` is told in words before a server is started, which happens when a prompt has to be counted. Raises
    UsageError for a ``workload.tokenizer`` that cannot be had.
    """
    settings, engine = _baseline(profile), engine_for(profile.engine.kind)
    counter, without_server = engine.prompt_counter(settings), planning_tokenizer(profile)
    if counter is None or ENGINES[profile.engine.kind].counts_exactly or profile.workload.tokenizer is not None:
        return nullcontext(without_server)
    if engine.is_launched and _directory(settings.model) is not None:
        return nullcontext(without_server)

    def open_server() -> AbstractContextManager[str]:
        if engine.is_launched:
            return launched_server(engine, settings, profile.timeouts, on_start)
        return nullcontext(engine.base_url(settings, 0))

    return ServerTokenizer(
        counter, open_server, question_headers(engine, settings), profile.timeouts, without_server
    )


def planning_tokenizer(profile: Profile) -> Tokenizer:
    """The same without any server: from files, else the estimate. Raises UsageError as ``tokenizer_for`` does."""
    if ENGINES[profile.engine.kind].counts_exactly:
        return Estimate()
    settings = _baseline(profile)
    if (named := profile.workload.tokenizer) is not None:
        return LocalTokenizer(directory_named(named), settings.request.chat_template_kwargs)
    directory = _directory(settings.model)
    if directory is None or importlib.util.find_spec("tokenizers") is None:
        return Estimate()
    return LocalTokenizer(directory, settings.request.chat_template_kwargs)


def prepare_counted(profile: Profile, tokenizer: Tokenizer, lengths_from: Path | None = None) -> PreparedSet:
    """The request set of a profile, counted by ``tokenizer``; with a warning where none is to be had.

    Raises as ``prepare_requests`` and the tokenizer do.
    """
    prepared = prepare_requests(profile, lengths_from=lengths_from, tokenizer=tokenizer)
    is_estimated = any(request.prompt_tokens_from == ESTIMATE for request in prepared)
    if not is_estimated or ENGINES[profile.engine.kind].counts_exactly:
        return prepared
    message = f"lengths of prompts are estimated, and may be far off: {_why_estimated(profile, tokenizer)}"
    warning = ResultWarning(code="prompt-lengths-estimated", message=message, where=KEY)
    return replace(prepared, warnings=(*prepared.warnings, warning))


def _why_estimated(profile: Profile, tokenizer: Tokenizer) -> str:
    """The reason in words, with the remedy."""
    settings, engine = _baseline(profile), engine_for(profile.engine.kind)
    directory = _directory(settings.model)
    if directory is not None:
        return f"to read the tokenizer in {directory}, run: python -m pip install tokenizers"
    missing = f"no tokenizer of model {settings.model!r} is on this machine"
    if isinstance(tokenizer, ServerTokenizer):
        return f"the server does not count them, and {missing}; name one in {KEY}"
    if engine.prompt_counter(settings) is not None:
        return f"{missing}, and a plan asks no server; the run will, or name one in {KEY}"
    return f"{missing}; name one in {KEY}"


def _baseline(profile: Profile) -> VariantSettings:
    """The settings of the first arm of the baseline."""
    variant, cell = next(arm for arm in arms(profile) if arm[0] == profile.baseline)
    return variant_settings(profile, variant, cell)


def _directory(model: str) -> Path | None:
    return directory_on_disk(model, repository_of(model))


@contextmanager
def launched_server(
    engine: Engine, settings: VariantSettings, timeouts: Timeouts, on_start: Callable[[str], None]
) -> Iterator[str]:
    """The address of a server of these settings, which is ready and lives as long as the context.

    ``on_start`` is told in words what is started. Raises EngineUnavailableError where it is not installed,
    ServerStartError where it does not become ready, and UsageError where it never will; the log is then
    kept.
    """
    engine.check_available(settings)
    directory = Path(tempfile.mkdtemp(prefix="benchctl-tokenizer-"))
    site = LaunchSite(port=choose_port(settings.server.fixed_port), directory=directory)
    launch = Launch(
        argv=engine.argv(settings, site),
        env=server_env(os.environ, engine.env(settings, site)),
        port=site.port,
        health_path=engine.health_path(settings),
        log=directory / "server.log",
        timeouts=timeouts,
        diagnose=engine.diagnose,
    )
    on_start(f"starting a server of {settings.variant} to count the prompts: only it has the tokenizer")
    with ServerProcess(launch) as server:
        try:
            run_interruptible(_ready(server, launch))
        except ServerStartError as error:
            if error.is_profile_error:
                raise UsageError(str(error), log_tail=error.log_tail) from error
            raise
        yield launch.base_url
    shutil.rmtree(directory, ignore_errors=True)


async def _ready(server: ServerProcess, launch: Launch) -> None:
    async with control_client(launch.base_url, launch.timeouts) as client:
        await server.wait_ready(client)
