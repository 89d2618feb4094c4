"""Configurations of kubernetes-sigs/inference-perf, checked against its schema, with the line of every key.

The models follow ``inference_perf/config`` at commit 7de5ef2 (August 2026), where every model forbids unknown keys.
What decides a load is modelled whole: api, data with its length distributions, load with its stages, server, and
report. Sections that change no request (metrics, storage, tokenizer, circuit breakers) and other data generators'
own sections are taken as they are.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import yaml
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchctl.errors import UsageError

COMMIT: Final = "7de5ef2"
KeyPath: TypeAlias = tuple[str | int, ...]
AnySection: TypeAlias = dict[str, Any] | None


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Distribution(_Model):
    """Lengths in tokens; ``std_dev`` or ``variance``, not both."""

    min: int = 10
    max: int = 1024
    mean: float = 512
    std_dev: float = 200
    total_count: int | None = None
    type: Literal["normal", "skew_normal", "lognormal", "uniform", "poisson", "fixed"] = "normal"
    variance: float | None = None
    skew: float = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> "Distribution":
        if self.variance is not None and self.std_dev > 0:
            raise ValueError("std_dev and variance are both set (std_dev is 200 unless it is set to 0)")
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class Api(_Model):
    """The endpoint and the form of a request."""

    type: Literal["completion", "chat", "anthropic_messages"] = "completion"
    streaming: bool = False
    headers: dict[str, str] | None = None
    slo_unit: str | None = None
    slo_tpot_header: str | None = None
    slo_ttft_header: str | None = None
    response_format: AnySection = None
    session_id_header_key: str | None = None
    session_token_header_key: str | None = None


class SharedPrefix(_Model):
    """Groups of prompts with a common beginning; each key of a number has an older name."""

    num_groups: int = Field(10, validation_alias=AliasChoices("num_unique_system_prompts", "num_groups"))
    num_prompts_per_group: int = Field(
        10, validation_alias=AliasChoices("num_users_per_system_prompt", "num_prompts_per_group")
    )
    system_prompt_len: int | Distribution = 100
    question_len: int | Distribution = 50
    output_len: int | Distribution = 50
    seed: int | None = None
    question_distribution: Distribution | None = None
    output_distribution: Distribution | None = None
    enable_multi_turn_chat: bool = False
    multimodal: AnySection = None


DataType: TypeAlias = Literal[
    "mock",
    "shareGPT",
    "synthetic",
    "random",
    "shared_prefix",
    "cnn_dailymail",
    "infinity_instruct",
    "billsum_conversations",
    "otel_trace_replay",
    "weka_trace_replay",
    "conversation_replay",
    "visionarena",
]


class Data(_Model):
    """The source of prompts."""

    type: DataType = "mock"
    path: str | None = None
    corpus_file_path: str | None = None
    input_distribution: Distribution | None = None
    output_distribution: Distribution | None = None
    shared_prefix: SharedPrefix | None = None
    multimodal: AnySection = None
    trace: AnySection = None
    otel_trace_replay: AnySection = None
    weka_trace_replay: AnySection = None
    conversation_replay: AnySection = None
    visionarena: AnySection = None
    use_chat_template: bool = False

    @model_validator(mode="after")
    def _complete(self) -> "Data":
        if self.use_chat_template and self.type != "random":
            raise ValueError(f"use_chat_template needs type random, not {self.type}")
        if self.type == "shared_prefix" and self.shared_prefix is None:
            raise ValueError("type shared_prefix needs the section shared_prefix")
        return self


class RateStage(_Model):
    """So many requests per second for so many seconds."""

    rate: float = Field(gt=0)
    duration: int = Field(gt=0)

    @property
    def num_requests(self) -> int:
        return int(self.rate * self.duration)


class ConcurrentStage(_Model):
    """So many requests, of which so many are open at the same time."""

    num_requests: int = Field(gt=0)
    concurrency_level: int = Field(gt=0)
    rate: float | None = None
    duration: int | None = None


class SessionStage(_Model):
    """Sessions of a recorded trace."""

    concurrent_sessions: int = Field(ge=0)
    session_rate: float | None = Field(default=None, gt=0)
    num_sessions: int | None = Field(default=None, gt=0)
    timeout: float | None = Field(default=None, gt=0)


class Load(_Model):
    """The schedule of requests."""

    type: Literal["constant", "poisson", "trace_replay", "concurrent", "trace_session_replay"] = "constant"
    interval: float = 1.0
    stages: list[RateStage] | list[ConcurrentStage] | list[SessionStage] = []
    sweep: AnySection = None
    num_workers: int | None = None
    worker_max_concurrency: int = 100
    worker_max_tcp_connections: int = 2500
    trace: AnySection = None
    circuit_breakers: list[str] = []
    request_timeout: float | None = None
    lora_traffic_split: list[dict[str, Any]] | None = None
    base_seed: int | None = None

    @model_validator(mode="after")
    def _sweeps_rates(self) -> "Load":
        if self.sweep is not None and self.type in {"concurrent", "trace_session_replay"}:
            raise ValueError(f"sweep cannot be used with type {self.type}")
        return self


class Server(_Model):
    """The server under test, which inference-perf does not start."""

    base_url: str
    type: Literal["vllm", "sglang", "tgi", "mock"] = "vllm"
    model_name: str | None = None
    ignore_eos: bool = True
    api_key: str | None = None
    cert_path: str | None = None
    key_path: str | None = None


class RequestLifecycle(_Model):
    """Reports of what the client saw."""

    summary: bool | None = True
    per_stage: bool | None = True
    per_request: bool | None = False
    per_adapter: bool | None = True
    per_adapter_stage: bool | None = False
    percentiles: list[float] = []
    use_server_output_tokens: bool = False
    max_error_messages: int = 100


class Report(_Model):
    """Reports to write."""

    request_lifecycle: RequestLifecycle = RequestLifecycle()
    prometheus: AnySection = None
    session_lifecycle: AnySection = None
    goodput: AnySection = None


class Config(_Model):
    """A whole configuration."""

    api: Api = Api()
    data: Data = Data()
    load: Load = Load()
    metrics: AnySection = None
    report: Report = Report()
    storage: AnySection = None
    server: Server | None = None
    tokenizer: AnySection = None
    circuit_breakers: list[dict[str, Any]] | None = None


_STAGES: Final[Mapping[str, type[_Model]]] = {"concurrent": ConcurrentStage, "trace_session_replay": SessionStage}


@dataclass(frozen=True, slots=True)
class SchemaError:
    """A key that inference-perf would refuse."""

    path: KeyPath
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """One file: its configuration, or the errors because of which there is none."""

    path: str
    config: Config | None
    errors: tuple[SchemaError, ...]
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """The line of a key; that of the nearest key above it where it is not written."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_config(path: Path) -> ConfigFile:
    """Read one configuration. Raises UsageError for a file that is not a YAML mapping."""
    try:
        text = path.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(
            f"{path}: cannot be read as YAML: {problem}; name a configuration of inference-perf"
        ) from error
    if not isinstance(document, dict):
        raise UsageError(
            f"{path}: holds {type(document).__name__}, not a mapping; a configuration of inference-perf has keys "
            "such as api, data, load and server"
        )
    config, errors = _validated(document)
    return ConfigFile(path=str(path), config=config, errors=errors, lines=dict(_lines(node, ())))


def _validated(document: dict[str, Any]) -> tuple[Config | None, tuple[SchemaError, ...]]:
    """The configuration, with each stage read as one of the load's type, as inference-perf does."""
    load = document.get("load")
    stages = load.get("stages") if isinstance(load, dict) else None
    errors: list[SchemaError] = []
    if isinstance(load, dict) and isinstance(stages, list):
        kind = _STAGES.get(str(load.get("type", "constant")), RateStage)
        parsed = []
        for i, stage in enumerate(stages):
            try:
                parsed.append(kind.model_validate(stage))
            except ValidationError as error:
                errors += _errors(error, ("load", "stages", i), kind)
        document = {**document, "load": {**load, "stages": parsed}}
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        return None, (*_errors(error, (), Config), *errors)
    return (None if errors else config), tuple(errors)


def _errors(error: ValidationError, above: KeyPath, model: type[_Model]) -> Iterator[SchemaError]:
    for entry in error.errors(include_url=False):
        path = (*above, *_keys(entry["loc"]))
        if entry["type"] == "extra_forbidden":
            yield SchemaError(path, f"unknown key, which inference-perf forbids{_hint(model, entry['loc'])}")
        elif entry["type"] == "missing":
            yield SchemaError(path, "missing; inference-perf needs it")
        else:
            value = entry["input"]
            text = f" (value {value!r})" if isinstance(value, str | int | float | bool) else ""
            yield SchemaError(path, entry["msg"].removeprefix("Value error, ") + text)


def _keys(loc: tuple[int | str, ...]) -> KeyPath:
    """The keys of a location, without the names of classes that pydantic adds for a choice of types."""
    return tuple(step for step in loc if isinstance(step, int) or not (step[:1].isupper() or "[" in step))


def _hint(model: type[_Model], loc: tuple[int | str, ...]) -> str:
    section: type[_Model] | None = model
    for step in loc[:-1]:
        field = section.model_fields.get(str(step)) if section is not None else None
        choices = () if field is None else (get_args(field.annotation) or (field.annotation,))
        section = next((each for each in choices if isinstance(each, type) and issubclass(each, _Model)), None)
    if section is None:
        return ""
    matches = difflib.get_close_matches(str(loc[-1]), list(section.model_fields), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; keys are {', '.join(section.model_fields)}"


def _lines(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*path, str(key.value))
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield (*path, i), item.start_mark.line + 1
            yield from _lines(item, (*path, i))
