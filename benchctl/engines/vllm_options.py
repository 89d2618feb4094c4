"""Options of the engine ``vllm``."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from benchctl.profile.choices import (
    AdapterCount,
    ByteCount,
    Concurrency,
    ContextLength,
    DeviceCount,
    DraftSource,
    DraftTokens,
    Flag,
    PythonOptions,
    Share,
    check_rules,
)

MemorySize = Annotated[str, Field(pattern=r"^[0-9]{1,15}([kKmMgGtT]|\.[0-9]{1,6}[kmgt])?$")]
"""A number of bytes as vLLM reads it: ``256M``."""


class VllmOptions(PythonOptions):
    """Options of the engine ``vllm``; null leaves the choice to vLLM."""

    max_model_len: Annotated[ContextLength | None, Flag()] = None
    """Longest prompt and output together, in tokens."""
    gpu_memory_utilization: Annotated[Share | None, Flag()] = None
    """Share of the device's memory that the server may take."""
    kv_cache_memory_bytes: Annotated[MemorySize | ByteCount | None, Flag()] = None
    """Size of the KV cache, such as ``256M``; in place of a share of the memory. Without one on ``vllm-lenvm``,
    benchctl names the size that fits beside a value model in all arms."""
    tensor_parallel_size: Annotated[DeviceCount, Flag()] = 1
    """Devices that each layer is spread over."""
    data_parallel_size: Annotated[DeviceCount, Flag()] = 1
    """Replicas of the engine behind one front end."""
    enable_prefix_caching: Annotated[bool, Flag()] = False
    """Share KV blocks between prompts with a common beginning; off, because repeated prompts would be free."""
    enable_chunked_prefill: Annotated[bool | None, Flag()] = None
    """Compute long prompts in parts; null: vLLM's choice, and false on a CPU, where vLLM dies of a seeded request
    in parts."""
    enforce_eager: Annotated[bool, Flag()] = False
    """Run without compilation and CUDA graphs."""
    max_num_seqs: Annotated[Concurrency | None, Flag()] = None
    """Sequences in one batch at most."""
    max_num_batched_tokens: Annotated[ContextLength | None, Flag()] = None
    """Tokens in one step at most."""
    async_scheduling: Annotated[bool | None, Flag()] = None
    """Overlap the scheduler with the device."""
    load_format: Annotated[str | None, Flag()] = None
    """Source of the weights; ``dummy`` draws random ones and needs none on disk."""
    quantization: Annotated[str | None, Flag()] = None
    """Method by which weights are quantised."""
    enable_lora: Annotated[bool, Flag(when=True)] = False
    """Serve LoRA adapters beside the model; requests name one in ``request.model``."""
    max_lora_rank: Annotated[AdapterCount | None, Flag()] = None
    """Highest rank of an adapter; vLLM takes 1, 8, 16, 32, 64, 128, 256, 320 or 512."""
    max_loras: Annotated[AdapterCount | None, Flag()] = None
    """Adapters in one batch at most."""
    lora_modules: dict[str, str] = Field(default={})
    """Adapters by the name under which requests ask for them: directories or repositories."""
    num_speculative_tokens: DraftTokens | None = None
    """Tokens that are drafted for each sequence in each step; 0 or null: nothing is speculated."""
    speculative_method: Literal["draft_model", "ngram", "suffix", "eagle", "eagle3", "medusa", "mtp"] | None = None
    """Source of the drafts; null: ``draft_model`` where one is named. ``ngram`` looks for the last tokens in the
    text before and needs text that repeats."""
    draft_model: str | None = None
    """Directory, built-in name or repository of the model that drafts, with the tokenizer of the served one."""
    draft_sampling: Literal["greedy", "probabilistic"] | None = None
    """The draft's choice of a token: its likeliest one, vLLM's default, or a draw from its distribution, which at a
    temperature above 0 is accepted more often."""
    prompt_lookup_max: ContextLength | None = None
    """Most tokens that ``ngram`` compares; vLLM's default is 5."""
    speculative_config: Annotated[dict[str, Any] | None, Flag()] = None
    """Speculative decoding as vLLM takes it, where the options above do not reach; excludes them."""
    correct_cpu_sampling: bool = True
    """Put right what vLLM 0.32 on a CPU does to drafts at a temperature above 0; no effect on other servers."""
    step_log: bool = True
    """Record steps, by a statistics plugin inside the server's front end."""

    @property
    def speculates(self) -> bool:
        """True for a server that drafts tokens."""
        return bool(self.num_speculative_tokens) or self.speculative_config is not None

    @property
    def draft_source(self) -> DraftSource:
        """The heads of eagle, medusa and mtp read states of the served model, and no shape describes them."""
        document = self.speculative_config or {}
        method = document.get("method", self.speculative_method or (self.draft_model and "draft_model"))
        model = document.get("model", self.draft_model)
        # Methods that look their drafts up in text
        if method in {"ngram", "ngram_gpu", "suffix"}:
            return DraftSource()
        if method == "draft_model" and isinstance(model, str):
            return DraftSource(model=model)
        return DraftSource(problem=f"{method or 'speculative_config without a method'} names no model of its own")

    @model_validator(mode="after")
    def _is_consistent(self) -> "VllmOptions":
        own = {
            name: value
            for name in ("num_speculative_tokens", "speculative_method", "draft_model", "draft_sampling")
            if (value := getattr(self, name))
        }
        method = self.speculative_method or ("draft_model" if self.draft_model else None)
        problem = "needs a draft_model; name its directory" if self.draft_model is None else "has no draft_model"
        drafts = bool(self.num_speculative_tokens)
        check_rules(
            (
                self.speculative_config is not None and bool(own),
                f"speculative_config excludes {', '.join(own)}, which write it; leave one of the two out",
            ),
            (
                drafts and method is None,
                (
                    f"num_speculative_tokens is {self.num_speculative_tokens}, and nothing drafts them; name a "
                    "draft_model, or set speculative_method to ngram"
                ),
            ),
            (
                drafts
                and (method in {"draft_model", "eagle", "eagle3", "medusa"}) != (self.draft_model is not None),
                f"speculative_method {method} {problem}; or choose another method",
            ),
            (
                drafts and self.prompt_lookup_max is not None and method != "ngram",
                f"prompt_lookup_max is for ngram, and speculative_method is {method}; drop one of the two",
            ),
            (
                bool(self.lora_modules) and not self.enable_lora,
                "lora_modules names adapters, and enable_lora is false; set it to true",
            ),
        )
        return self

    def speculative_words(self, draft: str | None) -> tuple[str, ...]:
        """The flag that turns speculation on, with the checkpoint ``draft``; none where it is off."""
        if not self.num_speculative_tokens:
            return ()
        document = {
            "method": self.speculative_method or "draft_model",
            "model": draft,
            "num_speculative_tokens": self.num_speculative_tokens,
            "draft_sample_method": self.draft_sampling,
            "prompt_lookup_max": self.prompt_lookup_max,
        }
        given = {key: value for key, value in document.items() if value is not None}
        return "--speculative-config", json.dumps(given, separators=(",", ":"))
