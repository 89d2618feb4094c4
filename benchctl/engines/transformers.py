"""``transformers serve`` as an engine: the server that comes with the transformers library.

Its server is started by a launcher of ours (``inside/transformers/serve.py``), which records the steps of
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

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from benchctl.engines.engine import (
    LOOPBACK,
    Client,
    Device,
    LaunchSite,
    Recipe,
    own_options,
    profile_errors,
    signatures,
    streamed,
)
from benchctl.engines.environment import PythonServer, installed_versions
from benchctl.engines.hub import checkpoint_for, end_tokens_of, is_local, json_object
from benchctl.errors import EngineUnavailableError
from benchctl.profile.choices import BlockCount, BlockTokens, ContextLength, Flag, PythonOptions
from benchctl.profile.model import Sampling, VariantSettings
from benchctl.records.files import encode
from benchctl.records.record import PreparedRequest


class TransformersOptions(PythonOptions):
    """Options of the engine ``transformers`` (``transformers serve``); null leaves the choice to the server."""

    device: Annotated[str | None, Flag()] = None
    """Device that the model runs on, such as ``cpu`` or ``cuda``."""
    continuous_batching: Annotated[bool, Flag(when=True)] = True
    """Batch requests; if false, they are served one after another and no steps are recorded."""
    num_kv_blocks: Annotated[BlockCount | None, Flag("--cb-num-blocks")] = None
    """Blocks of the KV cache."""
    block_size: Annotated[BlockTokens | None, Flag("--cb-block-size")] = None
    """Tokens in one KV block."""
    max_num_batched_tokens: Annotated[ContextLength | None, Flag("--cb-max-batch-tokens")] = None
    """Tokens in one step at most."""
    enable_prefix_caching: bool = False
    """Share KV blocks between prompts with a common beginning; off, because repeated prompts would be free."""
    attn_implementation: Annotated[str | None, Flag()] = None
    """Kernels of attention."""
    step_log: bool = True
    """Record steps, by a launcher that times them inside the server."""


_final: Final = partial(signatures, is_final=True)
"""A thread of generation that ended: the server lives on, answers 503 and generates no more."""

_LESS_MEMORY: Final = "lower num_kv_blocks or max_num_batched_tokens, or free memory"
SIGNATURES: Final = (
    *signatures(
        "port-taken", "end the process that holds the port, or leave port out of the profile",
        "address already in use",
    ),
    *profile_errors("bad-model", "correct model: no such directory is there", "Repo id must be in the form"),
    *profile_errors(
        "bad-model", "name a local directory as model, or download the model before",
        "outgoing traffic has been disabled", "couldn't connect to",
        "is not a local folder and is not a valid model identifier",
    ),
    *profile_errors("bad-model", "the model's directory has no weights: complete it", "Error no file named"),
    *profile_errors("bad-model", "the model's weights are damaged: copy them again", "SafetensorError"),
    *profile_errors(
        "bad-model",
        "the model's directory is incomplete or of an unknown kind: it needs config.json and a tokenizer",
        "Unrecognized processing class", "Unrecognized model in", "Can't load tokenizer",
    ),
    *profile_errors(
        "bad-flag", "correct the option or the entry of extra_args that the message at the head of the log names",
        "serve --help' for",
    ),
    *profile_errors("bad-flag", "correct dtype", "Unsupported dtype"),
    *profile_errors("bad-flag", "correct attn_implementation", "Unsupported attention implementation"),
    *profile_errors(
        "bad-flag", "choose an attn_implementation that this environment has",
        "has been toggled on, but it cannot be used",
    ),
    *profile_errors(
        "bad-flag", "choose another attn_implementation, or set continuous_batching to false",
        "is not supported for continuous batching",
    ),
    *profile_errors("bad-device", "correct device, or install a torch that has it", "Torch not compiled with CUDA"),
    *profile_errors("bad-device", "set device to cpu, or make a GPU visible", "Found no NVIDIA driver"),
    *profile_errors(
        "missing-package", "complete the engine's environment: pip install 'transformers[serving]' torch requests",
        "ModuleNotFoundError: No module named", "Missing dependencies for serving", "You can install it with",
    ),
    *_final("out-of-memory", _LESS_MEMORY, "CUDA out of memory", "OutOfMemoryError", "can't allocate memory"),
    *_final("out-of-memory", _LESS_MEMORY, "MemoryError: Memory footprint"),
    *_final(
        "kv-cache-full", "the KV cache cannot hold one request: raise num_kv_blocks",
        "No requests can be scheduled and no requests can be offloaded",
    ),
    *_final(
        "generation-died", "the thread that generates has ended; the traceback in the server's log says why",
        "Error in generation loop",
    ),
)  # fmt: skip


_LAUNCHER: Final = Path(__file__).parent / "inside" / "transformers" / "serve.py"
_DISTRIBUTION: Final = "transformers"
NEEDED: Final = ("torch", "accelerate", "fastapi", "uvicorn", "openai", "pydantic")
"""Packages that its server needs; ``transformers[serving]`` installs all but torch."""
_PROOF: Final = """
import subprocess, sys
from pathlib import Path
import fastapi, pydantic, torch, transformers, uvicorn
subprocess.run([Path(sys.executable).with_name("transformers"), "--help"], check=True, stdout=subprocess.DEVNULL)
"""
_INFERRED: Final = {
    "num_blocks": "num_kv_blocks",
    "max_batch_tokens": "max_num_batched_tokens",
    "max_requests_per_batch": "max_num_batched_tokens",
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

    def check_requests(self, requests: Iterable[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for guidance, several choices, and lengths or ends that it would get wrong."""
        super().check_requests(requests, settings)
        if any(request.n > 1 for request in requests):
            raise self.refusal(
                settings, "gives one answer to each request and ignores n", "set workload.samples_as: requests"
            )
        options = settings.server
        if isinstance(options, TransformersOptions) and options.num_kv_blocks and options.block_size:
            room = options.num_kv_blocks * options.block_size
            longest = max((request.prompt_tokens + request.max_tokens for request in requests), default=0)
            if longest > room:
                raise self.refusal(
                    settings,
                    f"has a KV cache of {room} tokens and stops for good when one request needs more: {longest}",
                    "raise num_kv_blocks, or lower workload.output_len",
                )
        if not end_tokens_of(settings.model) and not all(request.ignore_eos for request in requests):
            raise self.refusal(
                settings,
                f"needs the token that ends a text, and {settings.model!r} is not a directory that names one",
                "name a local directory as model, or set stop: forced",
            )

    def metrics_path(self, settings: VariantSettings) -> str | None:
        """It offers no counters."""
        return None

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        """The launcher with its own words, ``--``, and the command line of ``transformers``."""
        options = own_options(settings, TransformersOptions)
        return (
            str(self.interpreter(settings)), str(_LAUNCHER), "--description", str(site.description),
            *(("--step-log", str(site.step_log)) if self.has_steps(settings) else ()),
            *(() if options.enable_prefix_caching else ("--no-prefix-caching",)),
            "--", "serve", checkpoint_for(settings.model, self.kind),
            "--host", LOOPBACK, "--port", str(site.port), "--default-seed", str(site.noise_seed),
            *options.flag_words(), *options.extra_args,
        )  # fmt: skip

    def env(self, settings: VariantSettings, site: LaunchSite) -> dict[str, str]:
        """Offline for a model on disk; variables of the profile take precedence."""
        return {
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **({"HF_HUB_OFFLINE": "1"} if is_local(settings.model) else {}),
            **super().env(settings, site),
        }

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        """Ask for ``request``; our own servers hold one model, which the request need not name."""
        options = settings.server
        config = _sampling_config(settings.sampling) | {
            "eos_token_id": -1 if request.ignore_eos else list(end_tokens_of(settings.model)),
            "pad_token_id": 0,  # never used: no row is padded. Unsaid, it would be taken from the end of text
        }
        body: dict[str, Any] = {"generation_config": encode(config).decode()}
        if not isinstance(options, TransformersOptions):
            body["model"] = options.request_model or settings.model
        elif not options.continuous_batching:
            body["seed"] = request.seed
        return streamed(request, settings, body)

    async def effective_config(self, client: Client, settings: VariantSettings, site: LaunchSite) -> dict[str, Any]:
        """The description that the launcher wrote. Raises UnsupportedError where the server cannot batch."""
        config = json_object(site.description)
        if config is None:  # the server's log says why
            config = dict(installed_versions(self.interpreter(settings), (_DISTRIBUTION, "torch")))
            return {"version": config.pop(_DISTRIBUTION, None), **config}
        options = own_options(settings, TransformersOptions)
        if options.continuous_batching and not config.get("continuous_batching"):
            raise self.refusal(
                settings,
                f"cannot batch requests of a {config.get('model_class', 'model of this kind')}",
                "set engine.options.continuous_batching to false",
            )
        inferred = {name for name, option in _INFERRED.items() if getattr(options, option) is None}
        unused = set[str]() if options.num_kv_blocks is None else {"max_memory_percent"}
        batching = {
            f"cb.{key}": value for key, value in config.pop("cb", {}).items() if key not in inferred | unused
        }
        seed = "ignored" if options.continuous_batching else "set when a request arrives"
        return {"version": config.pop(_DISTRIBUTION, None), **config, **batching, "request_seed": seed}

    def recipe(self, device: Device) -> Recipe:
        return Recipe(
            kind=self.kind,
            device=device,
            pins=("torch==2.13.0", "transformers[serving]==5.23.0"),
            cost="about a minute and 1.2 GB (several GB more with CUDA)",
            proof=_PROOF,
        )


def _sampling_config(sampling: Sampling) -> dict[str, Any]:
    """The profile's sampling as transformers spells it, complete, because the model's own would fill gaps."""
    if sampling.is_greedy:
        return {"do_sample": False, "repetition_penalty": sampling.repetition_penalty}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": max(sampling.top_k, 0),
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
        **({"min_p": sampling.min_p} if sampling.min_p else {}),
    }
