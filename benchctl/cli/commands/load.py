"""``benchctl load``: the load generator alone, on a server that is running already.

The option names of ``vllm bench serve`` are translated into its own.
"""

import math
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from typer.core import TyperCommand

from benchctl.cli.failures import advising, exit_code_of, in_words, keeping, spelled
from benchctl.cli.options import RESULTS, AsJson, refuse_certain, with_options
from benchctl.cli.screen import bar, has_room_for_bars, live_line, note, print_json, say, text_console, warn
from benchctl.engines.attach import AttachEngine
from benchctl.errors import UsageError
from benchctl.load.demand import size_of
from benchctl.measure.directory import Origin
from benchctl.measure.machine import LoadToSend, shortfalls
from benchctl.measure.sending import create_load_directory, load_server
from benchctl.measure.tokens import prepare_counted, tokenizer_for
from benchctl.profile.arrival import Arrival
from benchctl.profile.bounds import MAX_CONCURRENCY, MAX_OUTPUTS, MAX_SEED, MAX_TOKENS, MAX_WARMUPS
from benchctl.profile.choices import DatasetName
from benchctl.profile.engine_table import ENGINES, PLAIN_DIALECT, dialects
from benchctl.profile.load import profile_from_plain
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import write_json_atomic
from benchctl.records.record import RunRecord
from benchctl.report.load_tables import durations_table, load_result, missing_tail, totals_table
from benchctl.untrusted.files import UnreadableError, json_value
from benchctl.untrusted.text import visible_line
from benchctl.workload.datasets.base import FileDataset, OwnDataset, dataset_named
from benchctl.workload.datasets.own import own_rows

if TYPE_CHECKING:
    from benchctl.analysis.metrics.run import LoadFigures

_NAME: Final = "load"
_LIMIT: Final = re.compile(r"(?P<name>ttft|tpot|e2el):(?P<ms>[0-9]{1,9}(\.[0-9]*)?|\.[0-9]+)")
"""A limit of goodput on a latency."""
_NUM_PROMPTS: Final = 64
_OUTPUT_TOKENS: Final = 128
"""Length of an output if neither the command line nor the dataset sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The load, and what is kept of it."""

    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server, such as localhost:8000.")]
    model: Annotated[
        str | None, typer.Option(help="Name of the model at the server; by default the first one that it offers.")
    ] = None
    dialect: Annotated[
        str, typer.Option(metavar="DIALECT", help="API of the server: openai, or an engine such as vllm.")
    ] = "openai"
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_OUTPUTS, help="Number of requests; by default the rows of --prompts.", show_default="64"
        ),
    ] = None
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Prompts of your own as JSON Lines with prompt or messages; by default all rows.",
        ),
    ] = None
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, max=MAX_CONCURRENCY, help="Most requests that are open at once.")
    ] = None
    request_rate: Annotated[
        float | None, typer.Option(help="Requests per second, as a Poisson process; by default all at once.")
    ] = None
    burstiness: Annotated[
        float | None, typer.Option(help="Burstiness of --request-rate: 1 is Poisson, less than 1 is burstier.")
    ] = None
    dataset_name: Annotated[
        DatasetName | None,
        typer.Option(help="Source of prompts; by default synthetic with --input-len, else generated."),
    ] = None
    dataset_path: Annotated[str | None, typer.Option(metavar="FILE", help="File of the dataset.")] = None
    input_len: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_TOKENS, help="Approximate tokens of each prompt; all prompts begin differently."
        ),
    ] = None
    output_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_TOKENS,
            help=f"Tokens of each output; by default the dataset's, or {_OUTPUT_TOKENS}.",
        ),
    ] = None
    ignore_eos: Annotated[bool, typer.Option(help="Outputs have exactly this length, or at most this length.")] = (
        True
    )
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of all random choices.")] = 0
    num_warmups: Annotated[
        int,
        typer.Option(min=0, max=MAX_WARMUPS, help="Short requests before the load, which no number includes."),
    ] = 1
    warmup_waves: Annotated[
        int,
        typer.Option(min=0, max=50, help="Then at most so many waves of them, until two in a row are as fast."),
    ] = 0
    begin: Annotated[
        Literal["drained", "running"],
        typer.Option(help="Begin a closed loop with an idle server, or take over slots from warm-up requests."),
    ] = "drained"
    discard: Annotated[
        float,
        typer.Option(help="Share of an open loop's requests, from its beginning, that no number includes."),
    ] = 0.0
    workers: Annotated[str, typer.Option(metavar="auto|N", help="Processes that send the load.")] = "auto"
    priority: Annotated[
        Literal["auto", "none"],
        typer.Option(help="Request scheduling priority for the client, if permitted."),
    ] = "auto"
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the API key of the server.")
    ] = None
    timeout_s: Annotated[float, typer.Option(help="Seconds for each request, from its send to its last token.")] = (
        600.0
    )
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR|REPO", help="Tokenizer of the prompts' lengths; by default that of the model."),
    ] = None
    chat: Annotated[bool, typer.Option(help="Send each prompt as a chat with one message of the user.")] = False
    temperature: Annotated[float | None, typer.Option(help="Sampling: divides the logits.")] = None
    top_p: Annotated[float | None, typer.Option(help="Sampling: probability mass that is kept.")] = None
    top_k: Annotated[int | None, typer.Option(help="Sampling: number of tokens that are kept.")] = None
    min_p: Annotated[float | None, typer.Option(help="Sampling: least share of the likeliest token.")] = None
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Fields added to the body of every request.")
    ] = None
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Header of every request; ${NAME} is a variable; repeat as needed."
        ),
    ] = None
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LATENCY:MS",
            help="Count the requests within this limit of ttft, tpot or e2el; repeat as needed.",
        ),
    ] = None
    label: Annotated[str | None, typer.Option(help="Remark for the manifest and result.json.")] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="New directory; by default results/load/<utc>-<hash8>."),
    ] = None
    result_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write result.json to FILE.")] = None
    as_json: AsJson = False


_WORDS: Final = {
    "the command line: |engine 'attach', variant 'load': |; workload.columns names other columns": "",
    ", begin again with workload.repeat, or take several samples .*": "",
    "which has a key of its own; set workload.samples_per_prompt instead": "and one answer is counted; remove it",
    "which has a key of its own; set": "which has an option of its own; give",
    r"leave the key out|leave (\S+) out of the profile": "leave it out",
    "workload.revision is missing.*": "--dataset-name huggingface needs a commit, and load has no option for it; "
    "download the file, and name it with --prompts",
    "workload.path": "--dataset-path",
    "workload.dataset": "--dataset-name",
    "workload.max_tokens": "--output-len",
    "timeouts.request_s": "--timeout-s",
    "engine.options.served_model": "--model",
    "engine.options.url": "URL",
    r"(engine\.options\.)?\bapi_key_env": "--api-key-env",
    r"request\.headers\.": "--header ",
    "request.headers": "--header",
    " is null with": " is missing with",
    "--output-dir DIR": "--output DIR",
} | {
    rf"\b(?:workload\.(?:arrival\.)?|sampling\.|load\.|request\.|engine\.options\.|server\.){name}\b": (
        f"--{name.replace('_', '-')}"
    )
    for name in LoadOptions.__dataclass_fields__
}
"""The options of this command by the keys of a profile, in whose words others speak of them."""


@with_options
@spelled(_WORDS)
def load(options: LoadOptions) -> None:
    """Send a load to a running server and report latencies and throughput.

    No server is started, and neither the server nor the machine is sampled. The option names of 'vllm bench serve'
    are understood.
    """
    profile = profile_from_plain(_plain_profile(options), "the command line", is_to_send=True)
    engine, settings = AttachEngine(), variant_settings(profile, _NAME, {})
    engine.check_available(settings)
    argv = ("benchctl", *sys.argv[1:])
    origin = Origin(output_root=RESULTS, directory=options.output, label=options.label, argv=argv)
    with tokenizer_for(profile) as tokenizer:
        prepared = prepare_counted(profile, tokenizer)
    engine.check_requests(prepared, settings)
    size = size_of(prepared)
    refuse_certain(shortfalls([LoadToSend(profile, size)], options.output or RESULTS))
    results = create_load_directory(profile, prepared, origin)
    del prepared  # the load reads its requests from the file, one at a time
    next_step = f"Show them with: {shlex.join(['benchctl', 'show', str(results.path)])}"
    requests = show_live = None

    def advance(num_ended: int) -> None:
        if requests is not None:
            requests.update(num_ended - requests.n)

    with advising(next_step), ExitStack() as drawn:
        if has_room_for_bars(is_quiet=options.as_json):
            requests = drawn.enter_context(
                bar(total=size.num_requests, desc="requests", unit="req", leave=False, mininterval=1.0)
            )
            show_live = drawn.enter_context(live_line(position=1))
        record, figures = load_server(results, profile, advance, show_live)
    with keeping(results.path):
        _report(results, profile.workload.arrival, record, figures, options)
    raise typer.Exit(exit_code_of(record.state == "failed", record.state == "suspect"))


def _plain_profile(options: LoadOptions) -> dict[str, Any]:
    """The profile of one load. Raises UsageError for options that no profile can say."""
    if options.dialect not in dialects():
        raise UsageError(f"--dialect is {options.dialect!r}; choose one of {', '.join(dialects())}")
    dataset_name = options.dataset_name or ("generated" if options.input_len is None else "synthetic")
    path, num_prompts = options.dataset_path, options.num_prompts or _NUM_PROMPTS
    if options.prompts is not None:
        if options.dataset_name is not None or path is not None:
            raise UsageError("--prompts FILE is --dataset-name custom --dataset-path FILE: leave these out")
        dataset_name, path = "custom", options.prompts
    dataset = dataset_named(dataset_name)
    has_lengths = isinstance(dataset, OwnDataset) or (
        isinstance(dataset, FileDataset) and dataset.has_output_lengths
    )
    if dataset_name == "custom" and path is not None:
        rows = own_rows(path, "--dataset-path" if options.prompts is None else "--prompts")
        has_lengths, num_prompts = all(row.output_len for row in rows), options.num_prompts or len(rows)
    length: dict[str, int | None] = {"max_tokens": options.output_len or _OUTPUT_TOKENS}
    if options.ignore_eos:
        length = {"output_len": options.output_len or (None if has_lengths else _OUTPUT_TOKENS)}
    server = {"url": options.url, "dialect": options.dialect, "api_key_env": options.api_key_env}
    sampling = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
    }
    # the profile checks the bounds of a number, and says that longer texts are none
    workers = int(options.workers) if re.fullmatch("-?[0-9]{1,18}", options.workers) else options.workers
    return {
        "name": _NAME,
        "description": "One load on a running server",
        "seed": options.seed,
        "blocks": 1,
        "stop": "forced" if options.ignore_eos else "natural",
        # As the server is: what clients of its own would see, and other load generators.
        "engine": {
            "kind": "attach",
            "options": {**server, "served_model": options.model, "bypass_prefix_cache": False},
        },
        "model": options.model or "unknown",
        "workload": {
            "dataset": dataset_name,
            "path": path,
            "num_prompts": num_prompts,
            "input_len": options.input_len,
            "tokenizer": options.tokenizer,
            "chat": options.chat,
            **length,
            "arrival": _arrival(options),
            "num_warmups": options.num_warmups,
            "warmup_shapes": False,
            "max_warmup_waves": options.warmup_waves,
            "allow_prefix_cache_hits": True,
            "on_missing_dataset": "fail",
        },
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "request": {
            "extra_body": _extra_body("{}" if options.extra_body is None else options.extra_body),
            "headers": _headers(options.header or []),
        },
        "variants": {_NAME: {}},
        "baseline": _NAME,
        "primary_metrics": ["tpot_ms", "wall_s"],
        "slo": _limits(options.goodput or []) or None,
        "load": {
            "workers": workers,
            "priority": options.priority,
            "begin": options.begin,
            "discard": options.discard,
        },
        "timeouts": {"request_s": options.timeout_s},
        "telemetry": {"gpu_hz": 0.0, "host_hz": 0.0, "prometheus_hz": 0.0},
    }


def _limits(texts: Sequence[str]) -> dict[str, float]:
    """Limits as ``slo`` has them, from ``ttft:200``. Raises UsageError for another name or limit."""
    limits: dict[str, float] = {}
    for text in texts:
        limit = _LIMIT.fullmatch(text)
        if limit is None or not float(limit["ms"]) > 0:
            raise UsageError(f"--goodput {text}: expected ttft, tpot or e2el with a limit in ms, such as ttft:200")
        limits[f"{limit['name']}_ms"] = float(limit["ms"])
    return limits


def _extra_body(text: str) -> dict[str, Any]:
    fields: object = None
    with suppress(UnreadableError):
        fields = json_value(text, "--extra-body")
    if not isinstance(fields, dict):
        raise UsageError(f"--extra-body is not JSON of an object: {text}; write such as '{{\"logprobs\": 1}}'")
    return fields


def _headers(texts: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for text in texts:
        name, equals, headers[name] = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--header {text}: write NAME=VALUE")
    return headers


def _arrival(options: LoadOptions) -> dict[str, Any]:
    """A rate makes an open loop, capped by the concurrency; without a rate the concurrency makes a closed loop."""
    rate = None if options.request_rate == math.inf else options.request_rate  # as vLLM writes it
    if rate is None and options.burstiness is not None:
        raise UsageError("--burstiness needs a --request-rate; give one, or leave it out")
    kind = "burst" if options.max_concurrency is None else "closed-loop"
    if rate is not None:
        kind = "poisson" if options.burstiness is None else "gamma"
    return {
        "kind": kind,
        "request_rate": rate,
        "burstiness": 1.0 if options.burstiness is None else options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def _report(
    results: ResultDirectory, arrival: Arrival, record: RunRecord, figures: "LoadFigures", options: LoadOptions
) -> None:
    """Write the result, and print it as tables or as JSON."""
    path, manifest = results.path, results.manifest()
    warnings = (*manifest.warnings, *record.warnings)
    document = load_result(figures, record, manifest, arrival)
    write_json_atomic(path / "runs" / record.run_id / "result.json", document, within=path)
    if options.result_file is not None:
        options.result_file.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(options.result_file, document)
    if options.as_json:
        print_json(document | {"path": str(path), "warnings": warnings, "failure": record.failure})
        return
    console = text_console()
    if figures.num_requests:
        console.print(totals_table(figures))
        console.print()
        console.print(durations_table(figures))
        if (missing := missing_tail(figures)) is not None:
            say(missing)
    say(f"{record.state}: {path}")
    for warning in warnings:
        warn(in_words(f"{warning.code}: {warning.message}", _WORDS))
    if record.failure is not None:
        note(visible_line(in_words(f"benchctl: {record.failure.cause}: {record.failure.message}", _WORDS)))


_RENAMED: Final = {
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
    "--sharegpt-output-len": "--output-len",
    "--custom-output-len": "--output-len",
    "--served-model-name": "--model",
}
_WITHOUT_EFFECT: Final = ("--save-result", "--save-detailed", "--disable-tqdm", "--trust-remote-code")
"""Every load is saved with its details, and the bar appears only at a terminal."""
_REFUSED: Final = {
    "--append-result": "each load has a directory of its own; leave it out",
    "--ramp-up-strategy": "a load has one rate; measure each rate by itself with --request-rate",
    "--lora-modules": "name the adapter in --model",
    "--logprobs": "write --extra-body '{\"logprobs\": 1}'",
    "--use-beam-search": "write --extra-body '{\"use_beam_search\": true}'",
    "--profile": "benchctl starts no profiler in a server that it did not start; leave it out",
    "--metadata": "write --label TEXT",
    "--no-stream": "times of tokens need streams; leave it out",
}
_ZERO: Final = r"[0.]*"
_CHECKED: Final = {
    "--random-range-ratio": (_ZERO, ": lengths of one load are equal; leave it out"),
    "--random-prefix-len": (_ZERO, ": prompts of one load share no beginning; leave it out"),
    "--random-cv": (_ZERO, ": lengths of one load are equal; leave it out"),
    "--metric-percentiles": (
        r"(50|90|95|99)(,(50|90|95|99))*",
        "; result.json has 50, 90, 95, 99 and no others; leave it out",
    ),
    "--percentile-metrics": (
        r"(ttft|tpot|itl|e2el)(,(ttft|tpot|itl|e2el))*",
        "; all of ttft, tpot, itl, e2el are always given; leave it out",
    ),
}
"""Options of which only some values mean what ``load`` does anyway, and what is said of the others."""
_DIALECTS: Final = dict.fromkeys(("openai", "openai-comp", "openai-chat"), PLAIN_DIALECT) | {
    name: kind for kind, spec in ENGINES.items() for name in spec.backend_names
}
"""Values of ``--backend`` and the dialect of each; those in -chat send chats."""
_ENDPOINTS: Final = {"/v1/completions": "--no-chat", "/v1/chat/completions": "--chat"}
_SEVERAL: Final = {"--goodput": r"(ttft|tpot|e2el):\S+", "--header": r"[^-=\s][^=\s]*=.*"}
"""Options that take several values behind one name, and the form of a value."""
_KEPT_BACK: Final = ("--base-url", "--host", "--port", "--result-dir", "--result-filename")
"""Options that say something only together."""
_RANDOM_INPUT_LEN: Final = "1024"
"""vLLM's length of a random prompt where none is given."""


class LoadCommand(TyperCommand):
    """A command that also reads the names of ``vllm bench serve``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translated(args))


def translated(args: Sequence[str]) -> list[str]:
    """The words of a command line in our names. Raises UsageError for an option whose meaning cannot be kept."""
    words = [
        piece for word in args for piece in (word.split("=", 1) if re.match(r"--[a-z][a-z-]*=", word) else [word])
    ]
    words.reverse()  # the next word is the last
    ours: list[str] = []
    kept_back: dict[str, str] = defaultdict(str)
    while words:
        name = words.pop()
        if name in _REFUSED:
            raise UsageError(f"{name}: {_REFUSED[name]}")
        if name in _SEVERAL:
            ours += [name, _value(name, words)]
            while words and "://" not in words[-1] and re.fullmatch(_SEVERAL[name], words[-1], re.DOTALL):
                ours += [name, words.pop()]
        elif name in _CHECKED:
            allowed, problem = _CHECKED[name]
            if not re.fullmatch(allowed, value := _value(name, words)):
                raise UsageError(f"{name} is {value!r}{problem}")
        elif name in _KEPT_BACK:
            kept_back[name] = _value(name, words)
        elif name in {"--backend", "--endpoint-type", "--endpoint", "--dataset-name"}:
            ours += _with_meaning(name, _value(name, words), [*ours, *words])
        elif name not in _WITHOUT_EFFECT:
            ours.append(_RENAMED.get(name, name))
    return _complete(ours, kept_back)


def _value(name: str, words: list[str]) -> str:
    if not words:
        raise UsageError(f"{name} needs a value; write it behind the name")
    return words.pop()


def _with_meaning(name: str, value: str, others: Sequence[str]) -> list[str]:
    """The words for an option whose value we call otherwise; ``others`` are the other words of the line."""
    if name == "--dataset-name":
        if value != "random":
            return [name, value]
        has_length = {"--input-len", "--random-input-len"}.intersection(others)
        return [name, "synthetic", *([] if has_length else ["--input-len", _RANDOM_INPUT_LEN])]
    if name == "--endpoint":
        if value not in _ENDPOINTS:
            raise UsageError(f"{name} is {value!r}; requests go to {' or '.join(_ENDPOINTS)}; leave it out")
        return [_ENDPOINTS[value]]
    if value not in _DIALECTS:
        raise UsageError(f"{name} is {value!r}; choose one of {', '.join(_DIALECTS)}, or give --dialect")
    return ["--dialect", _DIALECTS[value], *(["--chat"] if value.endswith("-chat") else [])]


def _complete(words: list[str], kept_back: dict[str, str]) -> list[str]:
    """All words, with the address first, and the file of the result last."""
    host, port = kept_back["--host"] or "127.0.0.1", kept_back["--port"] or "8000"
    directory, file = kept_back["--result-dir"], kept_back["--result-filename"]
    if directory or file:
        words = [*words, "--result-file", f"{directory or '.'}/{file or 'benchctl-load.json'}"]
    if kept_back["--base-url"] or kept_back["--host"] or kept_back["--port"]:
        words = [kept_back["--base-url"] or f"http://{host}:{port}", *words]
    return words


app = typer.Typer(add_completion=False)
app.command("load", cls=LoadCommand)(load)
