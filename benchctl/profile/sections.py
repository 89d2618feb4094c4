"""Sections of a profile that rest on no other: fields of requests, limits, telemetry, load, verdict, and cluster.

Nothing of ``cluster`` is measured, and the identity of an experiment leaves it out: the same experiment may be
continued on another partition. Its texts that stand in the header of a job script have no spaces and no quotes.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, field_validator

from benchctl.errors import EngineUnavailableError
from benchctl.profile.bounds import MAX_DEVICES
from benchctl.profile.choices import (
    DEFAULT_THRESHOLD,
    BlockTokens,
    RequestCount,
    Seconds,
    Section,
    ThreadCount,
    TokenCount,
    check_rules,
)
from benchctl.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, SECONDS_PER_MINUTE, fraction
from benchctl.untrusted.secrets import holds_key, is_secret_name

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OWN_HEADERS: Final = frozenset(
    {
        "connection", "content-encoding", "content-length", "content-type", "host", "transfer-encoding",
        "x-request-id",
    }
)  # fmt: skip
"""Headers without which a request is no longer the one that is measured."""
_OWN_FIELDS: Final[Mapping[str, str]] = {
    "model": "request.model",
    "prompt": "workload",
    "messages": "workload",
    "max_tokens": "workload.output_len",
    "max_completion_tokens": "workload.output_len",
    "min_tokens": "stop",
    "ignore_eos": "stop",
    "stop": "stop",
    "stop_token_ids": "stop",
    "n": "workload.samples_per_prompt",
    "best_of": "workload.samples_per_prompt",
    "seed": "seed",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "response_format": "request.response_format",
    "structured_outputs": "request.structured_outputs",
    "chat_template_kwargs": "request.chat_template_kwargs",
}
"""Fields on which the measurement rests, or that have a key of their own, and the key that sets each."""


class RequestOptions(Section):
    """Fields of every request of a variant beside its prompt, its length and ``sampling``."""

    model: str | None = Field(default=None, min_length=1)
    """Name of the model in requests, such as that of a LoRA adapter; null: the served model."""
    extra_body: dict[str, Any] = {}
    """Fields added to the JSON body as they are, in place of benchctl's own where the names are equal; not those on
    which the measurement rests, nor those that have a key."""
    headers: dict[str, str] = {}
    """HTTP headers. ``${NAME}`` stands for a variable of the environment; a value with one is never recorded.
    Without one only headers such as ``User-Agent`` are taken, whose values are no secrets."""
    response_format: dict[str, Any] | None = None
    """Form of the answer, as in OpenAI's API: ``{type: json_schema, json_schema: {...}}``."""
    structured_outputs: dict[str, Any] | None = None
    """Constraint on the answer as vLLM names it, ``json``, ``regex``, ``choice`` or ``grammar``; sent to SGLang and
    llama.cpp in their own fields."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as ``enable_thinking``; for data sets of chats."""

    @field_validator("extra_body")
    @classmethod
    def _leaves_the_measurement_alone(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name in fields:
            check_rules(
                # Fields without which no token has a time and no answer a count
                (
                    name in {"stream", "stream_options"},
                    f"sets {name}, by which answers are timed and counted; remove it",
                ),
                (
                    name in _OWN_FIELDS,
                    f"sets {name}, which has a key of its own; set {_OWN_FIELDS.get(name)} instead",
                ),
                (
                    is_secret_name(name),
                    (
                        f"sets {name}, which looks like a secret, and bodies are recorded; send it as a header "
                        "with ${NAME} in request.headers"
                    ),
                ),
            )
        return fields

    @field_validator("headers")
    @classmethod
    def _headers_can_be_sent_and_recorded(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            plain = _VARIABLE.sub("", value)
            check_rules(
                (
                    not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name),
                    f"{name!r} is not the name of a header; write letters, digits and '-'",
                ),
                (
                    name.lower() in _OWN_HEADERS,
                    f"{name} is benchctl's own: requests could not be sent or told apart with another; remove it",
                ),
                ("${" in plain, f"{name} has a '${{' that names no variable; write ${{NAME}}"),
                (
                    not (plain.isascii() and plain.isprintable()),
                    f"{name} holds line breaks or other characters that no header carries; correct its value",
                ),
                (
                    holds_key(plain),
                    (
                        f"{name} looks like a secret, which profiles and results must not hold; put its value into "
                        "a variable of the environment, and write ${NAME} here"
                    ),
                ),
            )
        return headers

    @property
    def asks_for_json(self) -> bool:
        """True where the form of the answer is a JSON document."""
        is_form = (self.response_format or {}).get("type") in {"json_object", "json_schema"}
        return is_form or bool({"json", "json_object"} & (self.structured_outputs or {}).keys())

    def stated(self) -> dict[str, Any]:
        """The fields that are set, by dotted path: those of free sections one by one, a form of the answer whole.

        Headers are as written, with ``${NAME}`` for what is never recorded.
        """
        flat: dict[str, Any] = {} if self.model is None else {"model": self.model}
        for name in ("extra_body", "headers", "chat_template_kwargs"):
            flat |= _leaves(getattr(self, name) or {}, name)
        for name in ("response_format", "structured_outputs"):
            flat |= {f"{name}.{key}": value for key, value in (getattr(self, name) or {}).items()}
        return flat

    @property
    def variables(self) -> frozenset[str]:
        """The variables of the environment that its headers name."""
        return frozenset(name for value in self.headers.values() for name in variables_in(value))

    def sent_headers(self) -> tuple[dict[str, str], dict[str, str]]:
        """The headers as they are sent now, and the values in them that must never be recorded, by variable.

        Raises EngineUnavailableError for a variable that is not set or that no header can carry.
        """
        values = dict[str, str]()
        for header, value in self.headers.items():
            for variable in variables_in(value):
                if problem := variable_problem(variable):
                    raise EngineUnavailableError(f"request.headers.{header}: {problem}")
                values[variable] = os.environ[variable]
        headers = {
            name: _VARIABLE.sub(lambda match: values[match[1]], value) for name, value in self.headers.items()
        }
        return headers, values


def variables_in(value: str) -> tuple[str, ...]:
    """The variables of the environment that the value of a header names."""
    return tuple(_VARIABLE.findall(value))


def variable_problem(variable: str) -> str | None:
    """The problem of a variable that a header needs; None where the environment has it."""
    value = os.environ.get(variable)
    if not value:
        return f"{variable} is not set in the environment; export {variable}, or leave the header out"
    if not (value.isascii() and value.isprintable()):
        return (
            f"the value of {variable} holds line breaks or other characters that no header carries; export it "
            "without them"
        )
    return None


def _leaves(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Values of nested mappings by dotted path; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}.{key}"
        flat |= _leaves(value, path) if isinstance(value, dict) and value else {path: value}
    return flat


class SharedPrefix(Section):
    """First tokens that the prompts of a group have in common, and that the prefix cache has before each load."""

    groups: RequestCount = 1
    """Number of prefixes; prompts take them in turn."""
    hit_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of each prompt that its prefix is, to the nearest whole block; either this or ``len``."""
    len: TokenCount | None = None
    """Tokens of a prefix, to the nearest whole block; fewer in prompts that have no room for them."""
    block: BlockTokens = 16
    """Tokens that the server's cache finds together: 128 for vLLM on a CPU, 1 for SGLang."""

    def tokens_of(self, prompt_tokens: int) -> int:
        """Tokens of the prefix of a prompt of so many, in whole blocks, behind which one at least is its own."""
        planned = (self.hit_rate or 0) * prompt_tokens if self.len is None else self.len
        return min(round(planned / self.block), (prompt_tokens - 1) // self.block) * self.block


PriorityOption = Literal["auto", "none"]


class Stopping(Section):
    """A rule, declared before the first run, that may end an experiment before its last block."""

    until: Literal["precision", "verdict"] = "precision"
    """``precision``: the experiment ends when it is precise, whatever the answer is. ``verdict``: when every
    primary metric in every cell has its verdict, or when no open one is likely to get one by the last block."""
    precision: float | None = Field(default=None, gt=0, lt=1)
    """Half the width of an interval, as a fraction (0.01 is one percent): the experiment ends when the interval of
    every primary metric in every cell is at most that wide. The sign of a change does not matter. Null with
    ``until: verdict``."""
    looks: int = Field(default=4, ge=1, le=20)
    """Number of looks at the data, evenly spaced from 6 blocks to the last. More of them make intervals wider; all
    together miss in at most 5 %."""


class Timeouts(Section):
    """Limits in seconds."""

    ready_s: Seconds = 600.0
    """From launch until the server answers."""
    request_s: Seconds = 600.0
    """From sending a request to its last token."""
    connect_s: Seconds = 10.0
    """For opening a connection."""
    first_token_s: Seconds | None = None
    """From sending a request to its first token; null: only ``request_s`` counts."""
    between_tokens_s: Seconds | None = None
    """From one token of a request to the next; null: only ``request_s`` counts."""
    stall_s: Seconds = 120.0
    """Without a token of any request, while requests are open, until the server counts as hung."""
    stop_s: Seconds = 10.0
    """From asking a server to end until it is killed."""


def _fraction(value: object) -> object:
    """``1%`` as 0.01; anything else as it is."""
    if isinstance(value, str) and value.endswith("%"):
        with suppress(ValueError):
            return fraction(value)
    return value


class ComparisonRules(Section):
    """The rules of the verdict, declared before the first run."""

    estimator: Literal["robust", "mean"] = "robust"
    """``robust`` gives outlying blocks little weight; ``mean`` gives all blocks the same."""
    threshold: Annotated[float, BeforeValidator(_fraction)] = Field(default=DEFAULT_THRESHOLD, ge=0, lt=1)
    """Smallest change that counts, as ``1%`` or ``0.01``."""
    window: Literal["auto", "whole", "steady"] = "auto"
    """Part of each load whose metrics decide, for those that ``steady_*`` has as well: ``whole`` loads, their
    ``steady`` windows, or with ``auto`` these windows where every run of both sides has one."""


class Telemetry(Section):
    """Sampling rates in Hz; 0 switches a sampler off."""

    gpu_hz: float = Field(default=10.0, ge=0, le=100)
    """Readings of each visible GPU."""
    host_hz: float = Field(default=2.0, ge=0, le=20)
    """Readings of the server's processes and of the client."""
    prometheus_hz: float = Field(default=1.0, ge=0, le=10)
    """Readings of the server's counters and gauges, if it has any."""


class LoadOptions(Section):
    """Settings of the load generator."""

    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Processes that share the load, request by request in turn. ``auto``: enough to keep each below half a core at
    the expected token rate, with one core left free. Never more than slots or requests."""
    priority: PriorityOption = "auto"
    """Scheduling priority of the client during the load, so that a server that keeps all cores busy does not delay
    it. ``auto``: real-time scheduling at the lowest priority, else a negative nice value, else none, as permitted;
    ``none``: unchanged. ``benchctl doctor`` shows what is permitted."""
    begin: Literal["drained", "running"] = "drained"
    """State of the server when a closed loop begins. ``drained``: idle, so that the load begins with a burst from
    all slots. ``running``: busy with warm-up requests as it will be, whose slots the load takes over one by one."""
    discard: float = Field(default=0.0, ge=0, le=0.9)
    """Share of the requests of an open loop, from its beginning, that count as warm-up: no metric includes them."""


Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:@+,/-]*$", max_length=255)]
"""A name of the scheduler, or several with commas."""
Nodes = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.,\[\]-]*$", max_length=4000)]
"""Names of nodes, with ranges in brackets."""
Features = Annotated[str, Field(pattern=r"^[\w\[(!][\w.\[\]()&|,*!:=-]*$", max_length=1000)]
"""Features of nodes, with the scheduler's operators."""
Memory = Annotated[str, Field(pattern=r"^[0-9]{1,12}[KMGT]?$")]
_SECONDS: Final = {"days": SECONDS_PER_DAY, "hours": SECONDS_PER_HOUR, "minutes": SECONDS_PER_MINUTE, "seconds": 1}
_TIMES: Final = (
    re.compile(r"(?P<minutes>\d{1,9})(:(?P<seconds>\d{1,2}))?"),
    re.compile(r"(?P<hours>\d{1,6}):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})"),
    re.compile(r"(?P<days>\d{1,5})-(?P<hours>\d{1,2})(:(?P<minutes>\d{1,2})(:(?P<seconds>\d{1,2}))?)?"),
)


def scheduler_seconds(text: str) -> int | None:
    """The seconds of a time as Slurm writes and reads it; None for any other text.

    Its forms are ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``,
    ``days-hours:minutes`` and ``days-hours:minutes:seconds`` (man sbatch, --time).
    """
    match = next((whole for form in _TIMES if (whole := form.fullmatch(text.strip()))), None)
    if match is None:
        return None
    return sum(int(value) * _SECONDS[unit] for unit, value in match.groupdict(default="0").items())


class ClusterSettings(Section):
    """The job of one block on a cluster, and how often it is submitted again."""

    partition: Word | None = None
    """Partition, or several with commas; null: the cluster's own default, as for every key without a value."""
    account: Word | None = None
    """Account that the jobs are charged to."""
    qos: Word | None = None
    """Quality of service."""
    gpus_per_block: Annotated[int, Field(ge=0, le=MAX_DEVICES)] | None = None
    """GPUs of one block, which its servers use one after the other. null: as many as the largest server is spread
    over where the engine needs a GPU, and none for simulated and attached servers; for an engine that can do with
    or without, Slurm has to be told."""
    cpus: ThreadCount | None = None
    """Processor cores of one block, for the server and the client together."""
    mem: Memory | Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    """Memory of one block, such as ``64G``; a number alone is in MB, as Slurm has it."""
    exclusive: bool = False
    """True: a block has its node to itself, so that no other job disturbs it. Its other GPUs are then idle."""
    time: str | Annotated[int, Field(ge=1, le=5_256_000)] | None = None
    """Time limit of one block, as Slurm writes it: ``HH:MM:SS``, ``D-HH:MM:SS`` or minutes. A block that needs
    longer is refused."""
    constraint: Features | None = None
    """Features that a node must have, such as ``h100``."""
    exclude: Nodes | None = None
    """Nodes that no block may have, such as ``node[3,7-9]``."""
    python: str | None = None
    """Interpreter with benchctl on the nodes, or in the container; null: the one that submits, in a container
    ``python3``."""
    setup: tuple[str, ...] = Field(default=(), max_length=200)
    """Lines of shell before the block, such as ``module load cuda``."""
    container: str | None = None
    """Image in which blocks are measured: a file or an address that the runtime takes. benchctl must be in it."""
    container_runtime: Literal["apptainer", "pyxis"] = "apptainer"
    """Program that starts the container: ``apptainer`` (also SingularityCE), or ``pyxis``, a plug-in of Slurm."""
    parallel: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Most blocks at the same time; null: as many as the scheduler starts."""
    warn_s: int = Field(default=60, ge=1, le=65_535)
    """Seconds before the time limit at which the scheduler warns a task, which then ends its run; Slurm may warn
    up to a minute earlier."""
    resubmissions: int = Field(default=2, ge=0, le=100)
    """Times that blocks whose task ended without ending them are submitted again by a command that waits."""

    @field_validator("time")
    @classmethod
    def _is_time(cls, value: str | int | None) -> str | int | None:
        if isinstance(value, str) and not scheduler_seconds(value):
            raise ValueError(f"is {value!r}; write HH:MM:SS, D-HH:MM:SS, or minutes, above 0")
        return value

    @field_validator("setup")
    @classmethod
    def _has_no_secrets(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        if any(holds_key(line) for line in lines):
            raise ValueError(
                "holds what looks like a secret, which profiles and results must not hold; set it in the shell "
                "that submits, whose variables tasks inherit"
            )
        return lines

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds; None where the cluster has its own."""
        return None if self.time is None else scheduler_seconds(str(self.time))
