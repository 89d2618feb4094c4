"""``transformers serve`` as an engine: the server that comes with the transformers library.

Its server is started by a launcher of ours (``inside/serve.py``), which records the steps of
continuous batching and lets the server describe itself. What is particular about it:

* **Sampling** travels in ``generation_config``, a JSON string that replaces the model's own. With continuous
  batching the server keeps the sampling of its *first* request for its whole life; later ones set only
  ``max_tokens`` and the end of text. The first generation of every run therefore asks as the load will, and since
  all requests of a run share one sampling, the run is right.
* **Greedy** is ``do_sample: false``: for ``temperature: 0``, and for ``top_k: 1``, which would otherwise draw among
  tokens of equal logits. A finite ``top_k`` or ``top_p`` adds its own work to every step; greedy adds none.
* **Seeds** of requests are not honoured with continuous batching: one generator serves all rows, seeded once per
  server (``--default-seed``), so that texts also depend on which requests were batched together. Without it the
  seed is set when a request arrives, which is exact only while one request is under way.
* **Lengths** are not checked against the model's context: the server computes past it and answers 200. Such
  requests are refused here.
* It never sends ``[DONE]``, states usage in its last choice event, and refuses fields that it does not know (422).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from benchctl.engines.engine import LaunchSite, RequestCall, phase_of, raw_step_log
from benchctl.engines.environment import PythonServer, installed_versions
from benchctl.engines.hub import checkpoint_for, is_local, limits_of
from benchctl.engines.openai_server import LOOPBACK, own_options, streamed
from benchctl.engines.transformers.failures import SIGNATURES
from benchctl.engines.transformers.options import TransformersOptions
from benchctl.errors import EngineUnavailableError
from benchctl.profile.model import Sampling, VariantSettings
from benchctl.records.files import encode, read_jsonl
from benchctl.records.record import PreparedRequest
from benchctl.records.schema import StepRecord
from benchctl.untrusted.reading import UnreadableError, read_bytes

_LAUNCHER: Final = Path(__file__).parent / "inside" / "serve.py"
_DISTRIBUTION: Final = "transformers"
NEEDED: Final = ("torch", "accelerate", "fastapi", "uvicorn", "openai", "pydantic")
"""Packages that its server needs; ``transformers[serving]`` installs all but torch."""
_INFERRED: Final = {
    "cb.num_blocks": "num_kv_blocks",
    "cb.max_batch_tokens": "max_num_batched_tokens",
    "cb.max_requests_per_batch": "max_num_batched_tokens",
}
"""Settings that the server derives from the free memory, unless this option fixes them."""


class TransformersEngine(PythonServer):
    """Servers of ``transformers serve``, with continuous batching or one request at a time."""

    kind = environment = "transformers"
    distributions = (_DISTRIBUTION,)
    needed_packages = NEEDED
    signatures = SIGNATURES

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError without the library and what its server needs, or without a model."""
        python = self.interpreter(settings)
        versions = installed_versions(python, NEEDED)
        if missing := [name for name in NEEDED if name not in versions]:
            raise EngineUnavailableError(
                f"engine 'transformers': the environment of {python} lacks {', '.join(missing)}; "
                f"run: {python} -m pip install 'transformers[serving]' torch"
            )
        checkpoint_for(settings.model, self.kind)

    def check_requests(self, requests: Sequence[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for guidance, several choices, and lengths or ends that it would get wrong."""
        super().check_requests(requests, settings)
        if any(request.n > 1 for request in requests):
            what = "gives one answer to each request and ignores n"
            raise self.refusal(settings, what, "set workload.samples_as: requests")
        limits = limits_of(settings.model)
        self._check_lengths(requests, settings, limits.context)
        if not limits.eos_token_ids and not all(request.ignore_eos for request in requests):
            what = f"needs the token that ends a text, and {settings.model!r} is not a directory that names one"
            raise self.refusal(settings, what, "name a local directory as model, or set stop: forced")

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """It offers no counters."""
        return None

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """The launcher with its own words, ``--``, and the command line of ``transformers``."""
        options = own_options(settings, TransformersOptions)
        argv = [str(self.interpreter(settings)), str(_LAUNCHER), "--description", str(site.description)]
        if self.has_steps(settings):
            argv += ["--step-log", str(site.step_log)]
        if not options.enable_prefix_caching:
            argv.append("--no-prefix-caching")
        argv += ["--", "serve", checkpoint_for(settings.model, self.kind), "--host", LOOPBACK]
        argv += ["--port", str(site.port), "--default-seed", str(site.noise_seed)]
        return (*argv, *options.flag_words(), *options.extra_args)

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """Offline for a model on disk; variables of the profile take precedence."""
        own = {"HF_HUB_DISABLE_TELEMETRY": "1"}
        if is_local(settings.model):
            own["HF_HUB_OFFLINE"] = "1"
        return own | super().env(settings, site)

    def request_call(self, request: PreparedRequest, settings: VariantSettings) -> RequestCall:
        """Ask for ``request``; our own servers hold one model, which the request need not name."""
        options, config = settings.server, _sampling_config(settings.sampling)
        config["eos_token_id"] = -1 if request.ignore_eos else list(limits_of(settings.model).eos_token_ids)
        config["pad_token_id"] = 0  # never used: no row is padded. Unsaid, it would be taken from the end of text
        body: dict[str, Any] = {"generation_config": encode(config).decode()}
        if not isinstance(options, TransformersOptions):
            body["model"] = options.request_model or settings.model
        elif not options.continuous_batching:
            body["seed"] = request.seed
        return streamed(request, settings, body)

    async def effective_config(
        self, client: httpx.AsyncClient, settings: VariantSettings, site: LaunchSite
    ) -> dict[str, Any]:
        """The description that the launcher wrote. Raises UnsupportedError where the server cannot batch."""
        config = _described(site.description)
        if config is None:  # the server's log says why
            config = dict(installed_versions(self.interpreter(settings), (_DISTRIBUTION, "torch")))
            return {"version": config.pop(_DISTRIBUTION, None), **config}
        options = own_options(settings, TransformersOptions)
        if options.continuous_batching and not config.get("continuous_batching"):
            what = f"cannot batch requests of a {config.get('model_class', 'model of this kind')}"
            raise self.refusal(settings, what, "set engine.options.continuous_batching to false")
        batching = {f"cb.{name}": value for name, value in config.pop("cb", {}).items()}
        for name, option in _INFERRED.items():
            if getattr(options, option) is None:
                batching.pop(name, None)
        if options.num_kv_blocks is not None:
            batching.pop("cb.max_memory_percent", None)
        seed = "ignored" if options.continuous_batching else "set when a request arrives"
        return {"version": config.pop(_DISTRIBUTION, None), **config, **batching, "request_seed": seed}

    def has_steps(self, settings: VariantSettings) -> bool:
        """Steps are those of continuous batching, on servers of ours."""
        options = settings.server
        return isinstance(options, TransformersOptions) and options.step_log and options.continuous_batching

    def read_steps(self, directory: Path) -> Iterator[StepRecord]:
        """The steps that the launcher recorded; its docstring explains the fields."""
        for raw in read_jsonl(raw_step_log(directory), _RawStep):
            yield raw.normalised()

    def _check_lengths(
        self, requests: Sequence[PreparedRequest], settings: VariantSettings, context: int | None
    ) -> None:
        longest = max((request.prompt_tokens + request.max_tokens for request in requests), default=0)
        remedy = "lower workload.output_len or choose shorter prompts"
        if context is not None and longest > context:
            what = f"would silently compute past the context of {context} tokens: a request needs {longest}"
            raise self.refusal(settings, what, remedy)
        options = settings.server
        if isinstance(options, TransformersOptions) and options.num_kv_blocks and options.block_size:
            room = options.num_kv_blocks * options.block_size
            if longest > room:
                what = f"has a KV cache of {room} tokens and stops for good when one request needs more: {longest}"
                raise self.refusal(settings, what, f"raise num_kv_blocks, or {remedy}")


def _described(path: Path) -> dict[str, Any] | None:
    """The description of a server; None where it is missing or damaged."""
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any])
    except (UnreadableError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _RawStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the launcher."""

    step: int
    start_ns: int
    dur_ns: int
    num_seqs: int
    prefill_tokens: int
    decode_tokens: int
    output_tokens: int
    context_tokens: int
    is_greedy: bool
    schedule_ns: int
    forward_ns: int | None = None
    sampler_ns: int | None = None

    def normalised(self) -> StepRecord:
        sections = {
            "schedule": self.schedule_ns,
            "model_forward": self.forward_ns,
            "sampler_total": self.sampler_ns,
        }
        return StepRecord(
            step=self.step,
            start_ns=self.start_ns,
            dur_ns=self.dur_ns,
            clock="host",
            phase=phase_of(self.prefill_tokens, self.decode_tokens),
            num_seqs=self.num_seqs,
            num_prefill_tokens=self.prefill_tokens,
            num_decode_tokens=self.decode_tokens,
            context_tokens=self.context_tokens,
            output_tokens=self.output_tokens,
            is_greedy=self.is_greedy,
            sections_ns={name: spent for name, spent in sections.items() if spent is not None},
        )


def _sampling_config(sampling: Sampling) -> dict[str, Any]:
    """The profile's sampling as transformers spells it, complete, because the model's own would fill gaps."""
    if sampling.is_greedy:
        return {"do_sample": False, "repetition_penalty": sampling.repetition_penalty}
    config = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": max(sampling.top_k, 0),
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    return config | ({"min_p": sampling.min_p} if sampling.min_p else {})
