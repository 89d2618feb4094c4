"""The schema of a configuration of kubernetes-sigs/inference-perf, as pydantic models.

They follow ``inference_perf/config`` at commit 7de5ef2 (August 2026), where every model forbids unknown keys. What
decides a load is modelled whole. Sections that change no request (storage, parts of reports, circuit breakers) and
those of other data generators are taken as they are.
"""

from typing import Any, Final, Literal, TypeAlias

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

COMMIT: Final = "7de5ef2"
AnySection: TypeAlias = dict[str, Any] | None


class Schema(BaseModel):
    """A section; frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Distribution(Schema):
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


class Api(Schema):
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


class SharedPrefix(Schema):
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


class Data(Schema):
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


class RateStage(Schema):
    """So many requests per second for so many seconds."""

    rate: float = Field(gt=0)
    duration: int = Field(gt=0)

    @property
    def num_requests(self) -> int:
        return int(self.rate * self.duration)


class ConcurrentStage(Schema):
    """So many requests, of which so many are open at the same time."""

    num_requests: int = Field(gt=0)
    concurrency_level: int = Field(gt=0)
    rate: float | None = None
    duration: int | None = None


class SessionStage(Schema):
    """Sessions of a recorded trace."""

    concurrent_sessions: int = Field(ge=0)
    session_rate: float | None = Field(default=None, gt=0)
    num_sessions: int | None = Field(default=None, gt=0)
    timeout: float | None = Field(default=None, gt=0)


class Load(Schema):
    """The schedule of requests."""

    type: Literal["constant", "poisson", "trace_replay", "concurrent", "trace_session_replay"] = "constant"
    interval: float = 1.0
    stages: list[RateStage] | list[ConcurrentStage] | list[SessionStage] = []
    sweep: "Sweep | None" = None
    num_workers: int = 1
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


class Sweep(Schema):
    """Stages of rates up to the one at which the server saturates, found by a first burst."""

    type: Literal["geometric", "linear"]
    num_requests: int = 2000
    timeout: float = 60
    num_stages: int = 5
    stage_duration: int = 180
    saturation_percentile: float = 95


class Server(Schema):
    """The server under test, which inference-perf does not start."""

    base_url: str
    type: Literal["vllm", "sglang", "tgi", "mock"] = "vllm"
    model_name: str | None = None
    ignore_eos: bool = True
    api_key: str | None = None
    cert_path: str | None = None
    key_path: str | None = None


class RequestLifecycle(Schema):
    """Reports of what the client saw."""

    summary: bool | None = True
    per_stage: bool | None = True
    per_request: bool | None = False
    per_adapter: bool | None = True
    per_adapter_stage: bool | None = False
    percentiles: list[float] = []
    use_server_output_tokens: bool = False
    max_error_messages: int = 100


class Report(Schema):
    """Reports to write."""

    request_lifecycle: RequestLifecycle = RequestLifecycle()
    prometheus: AnySection = None
    session_lifecycle: AnySection = None
    goodput: AnySection = None


class Prometheus(Schema):
    """A Prometheus server to ask for the server's metrics."""

    scrape_interval: int = 15
    url: str | None = None
    filters: list[str] = []
    google_managed: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> "Prometheus":
        if bool(self.url) == self.google_managed:
            raise ValueError("needs either url or google_managed")
        return self


class Metrics(Schema):
    """The source of the server's metrics."""

    type: Literal["prometheus", "default"]
    prometheus: Prometheus | None = None


class Tokenizer(Schema):
    """The tokenizer that counts tokens."""

    pretrained_model_name_or_path: str | None = None
    trust_remote_code: bool | None = None
    token: str | None = None


class Config(Schema):
    """A whole configuration."""

    api: Api = Api()
    data: Data = Data()
    load: Load = Load()
    metrics: Metrics | None = None
    report: Report = Report()
    storage: AnySection = None
    server: Server | None = None
    tokenizer: Tokenizer | None = None
    circuit_breakers: list[dict[str, Any]] | None = None
