"""The facts of a kind of server software that other rooms need without its code: an entry of ``engine_table``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from benchctl.profile.choices import PENALTIES
from benchctl.profile.engine_options import ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """Names of counters and gauges, in Prometheus format, of one kind of server."""

    generated_tokens: tuple[str, ...] = ()
    """Counters of output tokens."""
    prefix_hits: tuple[str, ...] = ()
    """Counters of prompt tokens that were found in a cache instead of being computed."""
    drafts: tuple[str, ...] = ()
    """Counters of drafts that were verified, one for each sequence and step."""
    draft_tokens: tuple[str, ...] = ()
    """Counters of the tokens of these drafts."""
    accepted_tokens: tuple[str, ...] = ()
    """Counters of the draft tokens that were accepted."""
    accepted_by_position: tuple[str, ...] = ()
    """Counters of the same with a label ``position``, from 0."""
    open_requests: tuple[str, ...] = ()
    """Gauges that are 0 while the server is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """The fields of ``request`` and ``sampling`` that one kind of server understands, as far as that is known."""

    response_format: bool = True
    """True where it takes OpenAI's ``response_format``."""
    constraints: frozenset[str] | None = None
    """Keys of ``structured_outputs`` that it takes or that are spelled for it; None: all, judged by the server."""
    chat_template_kwargs: bool = True
    """True where it passes variables on to the chat template."""
    penalties: frozenset[str] = frozenset(PENALTIES)
    """Penalties of ``sampling`` that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Facts about one kind of server software that do not need its code.

    Classes are named by import path, ``module:name``, and loaded on first use.
    """

    kind: str
    """Its name in profiles."""
    options: str
    """Class of its options, a ``ServerOptions``."""
    implementation: str
    """Class that starts, asks and reads its servers, an ``engines.engine.Engine``."""
    is_virtual: bool = False
    """True if its times are computed and not measured: it needs no device, no core and no warm-up of its own."""
    is_attached: bool = False
    """True if someone else starts and ends its servers, on this machine or another."""
    counts_exactly: bool = False
    """True if its prompts need no tokenizer: the simulator counts as our estimate does, and passes have none."""
    serves_requests: bool = True
    """False if it computes forward passes without any request, for a workload with ``dataset: none``."""
    guides: bool = False
    """True if its servers can load a value model and guide with it."""
    installed_by: str | None = None
    """Command that installs it; None where nothing has to be installed."""
    needs_gpu: bool = False
    """True if it can only be installed on a machine with an NVIDIA GPU."""
    preset_without_gpu: str | None = None
    """Preset of its servers on machines without a GPU."""
    is_optional_check: bool = False
    """True if ``benchctl doctor`` looks for it only when it is named."""
    is_dialect: bool = False
    """True if ``attach`` can speak to its servers when someone else started them."""
    backend_names: tuple[str, ...] = ()
    """Names of its servers as ``--backend`` of other load generators."""
    cache_bypass: Literal["cache_salt", "cache_prompt"] | None = None
    """Field of a request that keeps its prompt from being found in a prefix cache."""
    adds_repetition_penalty: bool = False
    """True if its servers apply the repetition penalty of a model's own file unless a request sets one."""
    request_fields: RequestFields = RequestFields()
    """Fields of requests that its servers understand."""
    counters: ServerCounters = ServerCounters()
    """Names of its counters, where they are its own."""
    coded_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options behind each flag and variable that its code makes from them, beside those with a ``Flag``."""
    consequences: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Reported settings, as patterns, that follow from an option, setting or flag beside the one of its name."""

    @property
    def options_class(self) -> type[ServerOptions]:
        """The class of its options."""
        options: type[ServerOptions] = load_name(self.options)
        return options


def load_name(path: str) -> Any:
    """The object that ``module:name`` stands for."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
