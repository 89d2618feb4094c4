"""The contract between an engine and ``measure``, and the values that pass between the two.

An engine describes one kind of server software: how it is started, addressed and read, and what its log shows
when it fails. It starts nothing and keeps no state; ``measure`` owns processes, sockets and files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchctl.engines.prompt_counter import PromptCounter
from benchctl.errors import EngineUnavailableError
from benchctl.profile.engine_options import ENGINES, ServerOptions, engine_spec, load_name
from benchctl.profile.model import VariantSettings
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import Clock, ResultWarning, StepPhase, StepRecord

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
class RequestCall:
    """One request in the engine's dialect; ``body`` is JSON."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Values in the headers that must never be recorded, by the variable that holds each."""


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

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> RequestCall:
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
    engine: Engine = load_name(engine_spec(kind).implementation)()
    return engine
