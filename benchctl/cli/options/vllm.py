"""Option names of ``vllm bench serve`` as those of ``benchctl load``."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from typer.core import TyperCommand

from benchctl.errors import UsageError

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
