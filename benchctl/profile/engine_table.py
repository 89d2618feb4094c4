"""The table of engines: one module for each kind, whose ``SPEC`` states the facts that other rooms need.

An engine is added by one line in ``ENGINES``. Modules are imported by name when somebody needs them, because a
command needs few of them and imports otherwise go downwards only: profiles know engines through this table alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from benchctl.profile.choices import PENALTIES

if TYPE_CHECKING:
    from benchctl.profile.sections.engine_options import ServerOptions

ENGINES: Final[dict[str, str]] = {
    "sim": "benchctl.engines.sim",
    "vllm": "benchctl.engines.vllm",
    "vllm-lenvm": "benchctl.engines.vllm_lenvm",
    "sglang": "benchctl.engines.sglang",
    "sglang-lenvm": "benchctl.engines.sglang_lenvm",
    "llamacpp": "benchctl.engines.llamacpp",
    "transformers": "benchctl.engines.transformers",
    "attach": "benchctl.engines.attach",
    "micro": "benchctl.engines.micro",
}
"""Module with the ``SPEC`` of each kind of engine."""
OWN_PREFIX: Final = "BENCHCTL_"
"""Beginning of the variables of the environment that are benchctl's own."""
PLAIN_DIALECT: Final = "openai"
"""The dialect of servers of which nothing more is known than that they speak OpenAI's API."""


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


PLAIN_FIELDS: Final = RequestFields(
    constraints=frozenset(),
    chat_template_kwargs=False,
    penalties=frozenset({"presence_penalty", "frequency_penalty"}),
)
"""The fields of OpenAI's published API."""


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
    guides: bool = False
    """True if its servers can load a value model and guide with it."""
    is_dialect: bool = False
    """True if ``attach`` can speak to its servers when someone else started them."""
    adds_repetition_penalty: bool = False
    """True if its servers apply the repetition penalty of a model's own file unless a request sets one."""
    request_fields: RequestFields = RequestFields()
    """Fields of requests that its servers understand."""
    counters: ServerCounters = ServerCounters()
    """Names of its counters, where they are its own."""
    coded_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options behind each flag and variable that its code makes from them, beside those with a ``Flag``."""
    installed_by: str | None = None
    """Command that installs it; None where nothing has to be installed."""
    needs_gpu: bool = False
    """True if it can only be installed on a machine with an NVIDIA GPU."""
    preset_without_gpu: str | None = None
    """Preset of its servers on machines without a GPU."""
    serves_requests: bool = True
    """False if it computes forward passes without any request, for a workload with ``dataset: none``."""
    is_optional_check: bool = False
    """True if ``benchctl doctor`` looks for it only when it is named."""

    @property
    def options_class(self) -> "type[ServerOptions]":
        """The class of its options."""
        options: type[ServerOptions] = load_name(self.options)
        return options


def engine_spec(kind: str) -> EngineSpec:
    """The spec of a kind in ``ENGINES``; KeyError for any other."""
    spec: EngineSpec = import_module(ENGINES[kind]).SPEC
    return spec


def engine_specs() -> tuple[EngineSpec, ...]:
    """The specs of all engines, in the order of the table."""
    return tuple(engine_spec(kind) for kind in ENGINES)


def options_class(kind: str) -> "type[ServerOptions]":
    """The class of a kind's options; KeyError for an unknown kind."""
    return engine_spec(kind).options_class


@cache
def own_variables() -> Mapping[str, tuple[str, ...]]:
    """Variables of the environment by which benchctl tells its servers what to do, with the options behind each."""
    variables: dict[str, tuple[str, ...]] = {}
    for spec in engine_specs():
        for name, options in spec.coded_options.items():
            if name.startswith(OWN_PREFIX):
                variables[name] = tuple(dict.fromkeys((*variables.get(name, ()), *options)))
    return variables


def guiding_kinds() -> tuple[str, ...]:
    """Engines that can load a value model and guide with it, in alphabetical order."""
    return tuple(sorted(spec.kind for spec in engine_specs() if spec.guides))


def request_fields(kind: str) -> RequestFields:
    """The fields that servers of a kind, or of the plain dialect, understand."""
    return PLAIN_FIELDS if kind == PLAIN_DIALECT else engine_spec(kind).request_fields


def dialects() -> tuple[str, ...]:
    """Spellings of requests that ``attach`` can use."""
    return (*(spec.kind for spec in engine_specs() if spec.is_dialect), PLAIN_DIALECT)


def load_name(path: str) -> Any:
    """The object that ``module:name`` stands for."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
