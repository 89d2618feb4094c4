"""``benchctl load``: the load generator alone, on a server that is running already.

Option names of ``vllm bench serve`` as those of ``benchctl load``.
"""

import json
import math
import os
import re
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand

from benchctl.analysis.load_figures import parse_limits
from benchctl.cli.checks import check_machine, keeping
from benchctl.cli.failures import drawing
from benchctl.cli.options.load import (
    OUTPUT_TOKENS,
    ApiKeyEnv,
    AsJson,
    Burstiness,
    Chat,
    DatasetOption,
    DatasetPath,
    Dialect,
    ExtraBody,
    Goodput,
    Header,
    IgnoreEos,
    InputLen,
    LoadLabel,
    MaxConcurrency,
    MinP,
    Model,
    NumPrompts,
    NumWarmups,
    Output,
    OutputLen,
    Priority,
    PriorityOption,
    RequestRate,
    ResultFile,
    Seed,
    Temperature,
    TimeoutS,
    Tokenizer,
    TopK,
    TopP,
    Url,
    Workers,
)
from benchctl.cli.options.options import RESULTS
from benchctl.cli.screen import has_room_for_bars, print_json, warn, wide_console
from benchctl.engines.attach.engine import AttachEngine
from benchctl.errors import UsageError
from benchctl.measure.result_directory import Origin
from benchctl.measure.single_load.single_load import LoadResult, create_load_directory, load_server
from benchctl.measure.tokenizing.choice import prepare_counted, tokenizer_for
from benchctl.profile.engine_options import dialects
from benchctl.profile.load import profile_from_plain
from benchctl.profile.model import Profile
from benchctl.profile.planning import variant_settings
from benchctl.records.files import write_json_atomic
from benchctl.report.tables.load import bounds_note, durations_table, load_result, missing_tail, totals_table
from benchctl.untrusted.text import visible_line
from benchctl.workload.datasets.dataset import FileDataset, OwnDataset, dataset_named

_NAME: Final = "load"
_OBVIOUS_WARNING: Final = "server-not-fresh"
"""The user who typed the address knows that benchctl did not start the server."""
_EXIT_CODES: Final = {"done": 0, "suspect": 4, "failed": 5}


def _dialect(name: str) -> str:
    """The dialect; UsageError for an unknown one. The table of engines is read only here: ``--help`` stays fast."""
    if name not in dialects():
        raise UsageError(f"--dialect is {name!r}; choose one of {', '.join(dialects())}")
    return name


def load(  # the parameters are the command line
    url: Url,
    model: Model = None,
    dialect: Dialect = "openai",
    num_prompts: NumPrompts = 64,
    max_concurrency: MaxConcurrency = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = None,
    dataset_name: DatasetOption = None,
    dataset_path: DatasetPath = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    ignore_eos: IgnoreEos = True,
    seed: Seed = 0,
    num_warmups: NumWarmups = 1,
    workers: Workers = "auto",
    priority: PriorityOption = Priority.AUTO,
    api_key_env: ApiKeyEnv = None,
    timeout_s: TimeoutS = 600.0,
    tokenizer: Tokenizer = None,
    chat: Chat = False,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    extra_body: ExtraBody = None,
    header: Header = None,
    goodput: Goodput = None,
    label: LoadLabel = None,
    output: Output = None,
    result_file: ResultFile = None,
    as_json: AsJson = False,
) -> None:
    """Send a load to a running server and report latencies and throughput.

    No server is started, and neither the server nor the machine is sampled. The option names of 'vllm bench serve'
    are understood.
    """
    dataset_name = dataset_name or ("generated" if input_len is None else "synthetic")
    dataset = dataset_named(dataset_name)
    has_lengths = isinstance(dataset, OwnDataset) or (
        isinstance(dataset, FileDataset) and dataset.has_output_lengths
    )
    forced_len = OUTPUT_TOKENS if output_len is None and not has_lengths else output_len
    plain = _plain_profile(
        seed=seed,
        stop="forced" if ignore_eos else "natural",
        server={"url": url, "dialect": _dialect(dialect), "served_model": model, "api_key_env": api_key_env},
        workload={
            "dataset": dataset_name,
            "path": dataset_path,
            "num_prompts": num_prompts,
            "input_len": input_len,
            "tokenizer": tokenizer,
            "chat": chat,
            **({"output_len": forced_len} if ignore_eos else {"max_tokens": output_len or OUTPUT_TOKENS}),
            "arrival": _arrival(max_concurrency, request_rate, burstiness),
            "num_warmups": num_warmups,
        },
        load={"workers": _workers(workers), "priority": str(priority)},
        timeout_s=timeout_s,
    )
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    plain["sampling"] = {name: value for name, value in sampling.items() if value is not None}
    plain["request"] = {"extra_body": _extra_body(extra_body), "headers": _headers(header or [])}
    limits_ms = parse_limits(goodput or [])
    loaded = _load(plain, output, label, limits_ms, result_file, is_quiet=as_json)
    raise typer.Exit(_EXIT_CODES[loaded.record.state])


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--extra-body is not JSON: {error}; write '{{\"logprobs\": 1}}'") from None
    if not isinstance(fields, dict):
        raise UsageError(f"--extra-body is {text}; write a JSON object, such as '{{\"logprobs\": 1}}'")
    return fields


def _headers(texts: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--header {text}: write NAME=VALUE")
        headers[name] = value
    return headers


def _workers(option: str) -> str | int:
    """The value for the profile, which checks its bounds."""
    return int(option) if option.removeprefix("-").isdecimal() else option


def _arrival(max_concurrency: int | None, rate: float | None, burstiness: float | None) -> dict[str, Any]:
    """A rate makes an open loop, capped by the concurrency; without a rate the concurrency makes a closed loop."""
    if rate is not None and math.isinf(rate) and rate > 0:
        rate = None  # as vLLM writes it
    if rate is None:
        if burstiness is not None:
            raise UsageError("--burstiness needs a --request-rate; give one, or leave it out")
        kind = "burst" if max_concurrency is None else "closed-loop"
        return {"kind": kind, "max_concurrency": max_concurrency}
    arrival = {"request_rate": rate, "max_concurrency": max_concurrency}
    if burstiness is None:
        return {"kind": "poisson", **arrival}
    return {"kind": "gamma", "burstiness": burstiness, **arrival}


def _plain_profile(
    *,
    seed: int,
    stop: str,
    server: dict[str, Any],
    workload: dict[str, Any],
    load: dict[str, Any],
    timeout_s: float,
) -> dict[str, Any]:
    return {
        "name": _NAME,
        "description": "One load on a running server",
        "seed": seed,
        "blocks": 1,
        "stop": stop,
        # As the server is: what clients of its own would see, and other load generators.
        "engine": {"kind": "attach", "options": {**server, "bypass_prefix_cache": False}},
        "model": server["served_model"] or "unknown",
        "workload": {
            **workload,
            "warmup_shapes": False,
            "allow_prefix_cache_hits": True,
            "on_missing_dataset": "fail",
        },
        "variants": {_NAME: {}},
        "baseline": _NAME,
        "primary_metrics": ["tpot_ms", "wall_s"],
        "load": load,
        "timeouts": {"request_s": timeout_s},
        "telemetry": {"gpu_hz": 0.0, "host_hz": 0.0, "prometheus_hz": 0.0},
    }


def _load(
    plain: dict[str, Any],
    output_dir: Path | None,
    label: str | None,
    limits_ms: dict[str, float],
    result_file: Path | None,
    *,
    is_quiet: bool,
) -> LoadResult:

    profile = profile_from_plain(plain, "the command line", is_to_send=True)
    _check_key(profile)
    argv = ("benchctl", *sys.argv[1:])
    origin = Origin(output_root=RESULTS, directory=output_dir, label=label, argv=argv)
    with tokenizer_for(profile) as tokenizer:
        prepared = prepare_counted(profile, tokenizer)
    check_machine(profile, prepared.requests, output_dir or RESULTS)
    results = create_load_directory(profile, prepared, origin)
    try:
        with _progress(profile.workload.num_prompts, is_quiet=is_quiet) as on_progress:
            loaded = load_server(results, profile, on_progress, limits_ms)
    except KeyboardInterrupt:
        show = shlex.join(["benchctl", "show", str(results.path)])
        print(f"interrupted; results until now are kept. Show them with: {show}", file=sys.stderr)
        raise
    with keeping(results.path):
        _report(results.path, loaded, result_file, as_json=is_quiet)
    return loaded


def _check_key(profile: Profile) -> None:

    AttachEngine().check_available(variant_settings(profile, _NAME, {}))


@contextmanager
def _progress(num_requests: int, *, is_quiet: bool) -> Iterator[Callable[[int], None]]:

    if is_quiet or os.environ.get("CI") or not has_room_for_bars():
        yield lambda _num_ended: None
        return
    from tqdm import tqdm

    with tqdm(total=num_requests, desc="requests", unit="req", leave=False, file=drawing(sys.stderr)) as bar:

        def advanced(num_ended: int) -> None:
            bar.update(num_ended - bar.n)

        yield advanced


def _report(path: Path, loaded: LoadResult, result_file: Path | None, *, as_json: bool) -> None:

    document = load_result(loaded.figures, loaded.record, loaded.manifest, loaded.arrival)
    write_json_atomic(path / "runs" / loaded.record.run_id / "result.json", document, within=path)
    if result_file is not None:
        result_file.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(result_file, document)
    if as_json:
        warnings = (*loaded.manifest.warnings, *loaded.record.warnings)
        print_json(document | {"path": str(path), "warnings": warnings, "failure": loaded.record.failure})
    else:
        _print_tables(path, loaded)


def _print_tables(path: Path, loaded: LoadResult) -> None:

    console, record = wide_console(), loaded.record
    if loaded.figures.num_requests:
        console.print(totals_table(loaded.figures))
        console.print()
        console.print(durations_table(loaded.figures))
        for note in (bounds_note(loaded.figures), missing_tail(loaded.figures)):
            if note is not None:
                print(note)
    print(f"{record.state}: {path}")
    for warning in (*loaded.manifest.warnings, *record.warnings):
        if warning.code != _OBVIOUS_WARNING:
            warn(f"{warning.code}: {warning.message}")
    if record.failure is not None:
        print(visible_line(f"benchctl: {record.failure.cause}: {record.failure.message}"), file=sys.stderr)


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
_REFUSED_UNLESS_ZERO: Final = {
    "--random-range-ratio": "lengths of one load are equal; leave it out",
    "--random-prefix-len": "prompts of one load share no beginning; leave it out",
    "--random-cv": "lengths of one load are equal; leave it out",
}
_DIALECTS: Final = {
    "openai": "openai",
    "openai-comp": "openai",
    "openai-chat": "openai",
    "vllm": "vllm",
    "vllm-chat": "vllm",
    "sglang": "sglang",
    "sglang-oai": "sglang",
    "llama.cpp": "llamacpp",
}
"""Values of ``--backend`` and the dialect of each; those in -chat send chats."""
_ENDPOINTS: Final = {"/v1/completions": "--no-chat", "/v1/chat/completions": "--chat"}
_RANDOM_INPUT_LEN: Final = "1024"
"""vLLM's length of a random prompt where none is given."""
_PERCENTILES: Final = (50, 90, 95, 99)
_LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")


class LoadCommand(TyperCommand):
    """A command that also reads the names of ``vllm bench serve``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translated(args))


def translated(args: Sequence[str]) -> list[str]:
    """The words of a command line in our names. Raises UsageError for an option whose meaning cannot be kept."""
    words = deque(_without_equals(args))
    ours = _Translation()
    while words:
        word = words.popleft()
        if word in _RENAMED:
            ours.words.append(_RENAMED[word])
        elif word in _REFUSED:
            raise UsageError(f"{word}: {_REFUSED[word]}")
        elif word in ours.readers:
            ours.readers[word](word, words)
        elif word not in _WITHOUT_EFFECT:
            ours.words.append(word)
    return ours.complete()


def _without_equals(args: Sequence[str]) -> list[str]:
    """``--name=value`` as two words."""
    parts = (re.fullmatch(r"(--[a-z][a-z-]*)=(.*)", word, re.DOTALL) for word in args)
    return [piece for part, word in zip(parts, args, strict=True) for piece in (part.groups() if part else (word,))]


class _Translation:
    """Words in our names, and what several options of vLLM say together."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._address: dict[str, str] = {}
        self._result: dict[str, str] = {}
        self.readers: dict[str, Callable[[str, deque[str]], None]] = {
            **dict.fromkeys(("--base-url", "--host", "--port"), self._read_address),
            **dict.fromkeys(("--result-dir", "--result-filename"), self._read_result),
            **dict.fromkeys(("--backend", "--endpoint-type"), self._read_backend),
            "--endpoint": self._read_endpoint,
            "--dataset-name": self._read_dataset,
            **dict.fromkeys(("--goodput", "--header"), self._read_several),
            "--metric-percentiles": self._check_percentiles,
            "--percentile-metrics": self._check_latencies,
            **dict.fromkeys(_REFUSED_UNLESS_ZERO, self._check_zero),
        }

    def complete(self) -> list[str]:
        """All words, with the address first."""
        words = self.words
        if self._result:
            name = self._result.get("--result-filename", "benchctl-load.json")
            words += ["--result-file", f"{self._result.get('--result-dir', '.')}/{name}"]
        if not self._address:
            return words
        host, port = self._address.get("--host", "127.0.0.1"), self._address.get("--port", "8000")
        return [self._address.get("--base-url", f"http://{host}:{port}"), *words]

    def _read_address(self, name: str, words: deque[str]) -> None:
        self._address[name] = _value(name, words)

    def _read_result(self, name: str, words: deque[str]) -> None:
        self._result[name] = _value(name, words)

    def _read_backend(self, name: str, words: deque[str]) -> None:
        backend = _value(name, words)
        if backend not in _DIALECTS:
            raise UsageError(f"{name} is {backend!r}; choose one of {', '.join(_DIALECTS)}, or give --dialect")
        self.words += ["--dialect", _DIALECTS[backend], *(["--chat"] if backend.endswith("-chat") else [])]

    def _read_endpoint(self, name: str, words: deque[str]) -> None:
        endpoint = _value(name, words)
        if endpoint not in _ENDPOINTS:
            raise UsageError(f"{name} is {endpoint!r}; requests go to {' or '.join(_ENDPOINTS)}; leave it out")
        self.words.append(_ENDPOINTS[endpoint])

    def _read_dataset(self, name: str, words: deque[str]) -> None:
        dataset = _value(name, words)
        self.words += [name, "synthetic" if dataset == "random" else dataset]
        lengths = ("--input-len", "--random-input-len")
        if dataset == "random" and not any(word in lengths for word in (*self.words, *words)):
            self.words += ["--input-len", _RANDOM_INPUT_LEN]

    def _read_several(self, name: str, words: deque[str]) -> None:
        """vLLM takes several values behind one name."""
        is_value = re.compile(
            r"(ttft|tpot|e2el):\S+" if name == "--goodput" else r"[^=\s]+=.*", re.DOTALL
        ).fullmatch
        self.words += [name, _value(name, words)]
        while words and not words[0].startswith("-") and is_value(words[0]) and "://" not in words[0]:
            self.words += [name, words.popleft()]

    def _check_percentiles(self, name: str, words: deque[str]) -> None:
        value = _value(name, words)
        if any(part not in map(str, _PERCENTILES) for part in value.split(",")):
            given = ", ".join(map(str, _PERCENTILES))
            raise UsageError(f"{name} is {value!r}; result.json has {given} and no others; leave it out")

    def _check_latencies(self, name: str, words: deque[str]) -> None:
        value = _value(name, words)
        if any(part not in _LATENCIES for part in value.split(",")):
            raise UsageError(f"{name} is {value!r}; all of {', '.join(_LATENCIES)} are always given; leave it out")

    def _check_zero(self, name: str, words: deque[str]) -> None:
        value = _value(name, words)
        if value.strip("0.") != "":
            raise UsageError(f"{name} is {value!r}: {_REFUSED_UNLESS_ZERO[name]}")


def _value(name: str, words: deque[str]) -> str:
    if not words:
        raise UsageError(f"{name} needs a value; write it behind the name")
    return words.popleft()


app = typer.Typer(add_completion=False)
app.command("load", cls=LoadCommand)(load)
