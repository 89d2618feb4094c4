"""Option names of ``vllm bench serve`` as those of ``benchctl load``.

A command line written for the one is read by the other. What has another name is renamed, what has no effect here
is left out, and what would mean something else is refused.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
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

    def _read_address(self, name: str, words: "deque[str]") -> None:
        self._address[name] = _value(name, words)

    def _read_result(self, name: str, words: "deque[str]") -> None:
        self._result[name] = _value(name, words)

    def _read_backend(self, name: str, words: "deque[str]") -> None:
        backend = _value(name, words)
        if backend not in _DIALECTS:
            raise UsageError(f"{name} is {backend!r}; choose one of {', '.join(_DIALECTS)}, or give --dialect")
        self.words += ["--dialect", _DIALECTS[backend], *(["--chat"] if backend.endswith("-chat") else [])]

    def _read_endpoint(self, name: str, words: "deque[str]") -> None:
        endpoint = _value(name, words)
        if endpoint not in _ENDPOINTS:
            raise UsageError(f"{name} is {endpoint!r}; requests go to {' or '.join(_ENDPOINTS)}; leave it out")
        self.words.append(_ENDPOINTS[endpoint])

    def _read_dataset(self, name: str, words: "deque[str]") -> None:
        dataset = _value(name, words)
        self.words += [name, "synthetic" if dataset == "random" else dataset]
        lengths = ("--input-len", "--random-input-len")
        if dataset == "random" and not any(word in lengths for word in (*self.words, *words)):
            self.words += ["--input-len", _RANDOM_INPUT_LEN]

    def _read_several(self, name: str, words: "deque[str]") -> None:
        """vLLM takes several values behind one name."""
        is_value = re.compile(
            r"(ttft|tpot|e2el):\S+" if name == "--goodput" else r"[^=\s]+=.*", re.DOTALL
        ).fullmatch
        self.words += [name, _value(name, words)]
        while words and not words[0].startswith("-") and is_value(words[0]) and "://" not in words[0]:
            self.words += [name, words.popleft()]

    def _check_percentiles(self, name: str, words: "deque[str]") -> None:
        value = _value(name, words)
        if any(part not in map(str, _PERCENTILES) for part in value.split(",")):
            given = ", ".join(map(str, _PERCENTILES))
            raise UsageError(f"{name} is {value!r}; result.json has {given} and no others; leave it out")

    def _check_latencies(self, name: str, words: "deque[str]") -> None:
        value = _value(name, words)
        if any(part not in _LATENCIES for part in value.split(",")):
            raise UsageError(f"{name} is {value!r}; all of {', '.join(_LATENCIES)} are always given; leave it out")

    def _check_zero(self, name: str, words: "deque[str]") -> None:
        value = _value(name, words)
        if value.strip("0.") != "":
            raise UsageError(f"{name} is {value!r}: {_REFUSED_UNLESS_ZERO[name]}")


def _value(name: str, words: "deque[str]") -> str:
    if not words:
        raise UsageError(f"{name} needs a value; write it behind the name")
    return words.popleft()
