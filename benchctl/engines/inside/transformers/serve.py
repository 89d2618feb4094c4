"""Starts ``transformers serve`` and records its steps; run by the interpreter of the engine's environment.

    python serve.py [--step-log FILE] [--description FILE] [--no-prefix-caching] -- serve MODEL --port ...

Everything after ``--`` goes to the command line of transformers. Three things are changed on the way:
the loop of continuous batching writes a line for each step, the server describes itself in a file, and prefix
caching, for which the command line has no switch, can be turned off. Nothing of benchctl and nothing but the
standard library and transformers is imported. Where a version of transformers lacks what is looked for, or a file
cannot be written, the server's log reports it once and the server goes on.

**A step** is one turn of the loop: schedule a batch, compute it, hand its tokens out. ``start_ns`` and
``dur_ns`` are on CLOCK_MONOTONIC, in nanoseconds. Without asynchronous batching the turn waits for the device, so
that its duration is that of the work. With it (the engine's choice on CUDA with flash attention) the device
computes a batch while the host hands out the one before: a line then holds the batch whose tokens were handed out,
and the duration is the distance between two such moments, which is the time per step. The engine learns one step
late that a request has ended, so such a batch may hold rows that give no token, and the last batch of a burst is
collected only when the next request comes.

**Fields** are those of a step record of benchctl (``records/schema.py``). ``num_seqs`` rows of the batch,
``num_prefill_tokens`` and ``num_decode_tokens`` computed in it, ``output_tokens`` added to answers,
``context_tokens`` the sum of contexts after the step, ``is_greedy`` whether tokens are chosen by argmax. Of the
sections, ``schedule`` is the part before the computation; ``model_forward`` and ``sampler_total`` (logits
processors and drawing) are there only on the CPU, where a call lasts as long as its work.
"""

import argparse
import contextlib
import importlib
import json
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

CB_API = "transformers.generation.continuous_batching.continuous_api"
CB_RUNNER = "transformers.generation.continuous_batching.model_runner"
CB_LOGITS = "transformers.generation.continuous_batching.cb_logits_processors"
CONFIGURATION = "transformers.generation.configuration_utils"
SERVING = "transformers.cli.serving.utils"
DESCRIBED = (
    "page_size",
    "num_blocks",
    "max_batch_tokens",
    "max_memory_percent",
    "max_requests_per_batch",
    "max_blocks_per_request",
    "allow_block_sharing",
    "use_async_batching",
    "use_cuda_graph",
    "scheduler_type",
)
"""Settings of continuous batching as the server resolved them."""
_INCOMPLETE = "the server's description is incomplete"


def say(message: str) -> None:
    """One line in the server's log."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"benchctl: {message}\n")
        sys.stderr.flush()


def succeeds(loss: str, work: Callable[..., None], *args: Any) -> bool:
    """True where ``work`` is done; of an error the log says what is lost by it, and the server goes on."""
    try:
        work(*args)
    except Exception as error:  # noqa: BLE001 - no error of ours may reach the server
        say(f"{loss}: {type(error).__name__}: {error}")
        return False
    return True


class StepLog:
    """Times the turns of the batching loop. All its methods run in the thread of that loop."""

    def __init__(self, path: str) -> None:
        self._file: TextIO | None = None
        self._is_silent = False
        self._count = 0
        self._began_ns = self._schedule_ns = self._compute_ns = self._sampler_ns = 0
        self._in_flight: deque[dict[str, Any]] = deque()
        """Batches that were prepared and whose tokens were not handed out: one, or two when asynchronous."""
        self._is_host_time = False
        self._safely(self._open, path)

    def _open(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open while it serves

    def watch(self, processor: Any) -> None:
        """Patch the class of batch processors."""
        begin, prepare = processor.__init__, processor.prepare_next_batch
        compute, update = processor._generation_step, processor.update_batch

        def watched_begin(this: Any, *args: Any, **kwargs: Any) -> None:
            begin(this, *args, **kwargs)
            self._safely(self._look_at_device, this)

        def watched_prepare(this: Any) -> bool:
            start_ns = time.monotonic_ns()
            is_ready: bool = prepare(this)
            if is_ready:
                self._began_ns, self._schedule_ns = start_ns, time.monotonic_ns() - start_ns
                self._safely(self._take_batch, this)
            return is_ready

        def watched_compute(this: Any, *args: Any, **kwargs: Any) -> None:
            start_ns, self._sampler_ns = time.monotonic_ns(), 0
            compute(this, *args, **kwargs)
            self._compute_ns = time.monotonic_ns() - start_ns

        def watched_update(this: Any) -> None:
            self._safely(self._count_before)
            update(this)
            self._safely(self._write)

        processor.__init__, processor.prepare_next_batch = watched_begin, watched_prepare
        processor._generation_step, processor.update_batch = watched_compute, watched_update

    def _look_at_device(self, processor: Any) -> None:
        """On the CPU time the sampler too; elsewhere a call returns before its work is done."""
        self._is_host_time = getattr(processor.model_device, "type", None) == "cpu"
        if self._is_host_time:
            self._time_sampler(getattr(importlib.import_module(CB_RUNNER), "ModelRunner", None), "_sample")
            processors = getattr(importlib.import_module(CB_LOGITS), "ContinuousBatchingLogitsProcessorList", None)
            self._time_sampler(processors, "__call__")

    def _time_sampler(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            self._is_host_time = False
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.monotonic_ns()
            result = inner(*args, **kwargs)
            self._sampler_ns += time.monotonic_ns() - start_ns
            return result

        setattr(owner, name, timed)

    def _take_batch(self, processor: Any) -> None:
        """Keep the composition of the batch: its requests change while it is computed."""
        rows = rows_of(processor.inputs_and_outputs)
        prefill = sum(row.query_length for row in rows if is_prefill(row))
        decode = sum(row.query_length for row in rows) - prefill
        self._in_flight.append(
            {
                "states": [row.state for row in rows],
                "num_seqs": len(rows),
                "num_prefill_tokens": prefill,
                "num_decode_tokens": decode,
                "phase": ("mixed" if decode else "prefill") if prefill else "decode",
                "context_tokens": sum(row.state.position_offset for row in rows),
                "is_greedy": not processor.do_sample,
            }
        )

    def _count_before(self) -> None:
        self._in_flight[0]["output_tokens"] = -answered(self._in_flight[0]["states"])

    def _write(self) -> None:
        dur_ns, batch = time.monotonic_ns() - self._began_ns, self._in_flight.popleft()
        batch["output_tokens"] += answered(batch.pop("states"))
        sampler_ns, forward_ns = self._sampler_ns, self._compute_ns - self._sampler_ns
        waited = {"model_forward": forward_ns, "sampler_total": sampler_ns} if self._is_host_time else {}
        line = {
            "step": self._count,
            "start_ns": self._began_ns,
            "dur_ns": dur_ns,
            "clock": "host",
            **batch,
            "sections_ns": {"schedule": self._schedule_ns, **waited},
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")  # type: ignore[union-attr]
        self._count += 1

    def _safely(self, work: Callable[..., None], *args: Any) -> None:
        if not self._is_silent and not succeeds(f"steps are recorded no further after {self._count}", work, *args):
            self._is_silent = True
            self._in_flight.clear()


def rows_of(inputs: Any) -> list[Any]:
    """The rows of the batch that was just prepared; asynchronous batching alternates between two of them."""
    if hasattr(inputs, "io_pairs"):
        inputs = inputs.io_pairs[inputs.current_pair].host_io
    return list(inputs.requests_in_batch)


def is_prefill(row: Any) -> bool:
    """True for a row that computes prompt: its query begins before the end of the request's own tokens."""
    return bool(row.state.position_offset - row.query_length < len(row.state.initial_tokens))


def answered(states: Iterable[Any]) -> int:
    """Tokens that the answers of these requests hold."""
    return sum(len(state.generated_tokens) for state in states)


class Description:
    """The server's description of itself, replaced atomically whenever more is known."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._facts: dict[str, Any] = {"python": platform.python_version()}
        self._model: Any = None

    def watch(self, handler: Any, processor: Any) -> None:
        """Patch the class of request handlers and, where there is one, that of batch processors."""
        resolve = handler._resolve_model

        def watched_resolve(this: Any, body: Any) -> Any:
            resolved = resolve(this, body)
            if self._model is None:
                succeeds(_INCOMPLETE, self._add_model, resolved[1])
            return resolved

        handler._resolve_model = watched_resolve
        if processor is None:
            return
        begin = processor.__init__

        def watched_begin(this: Any, *args: Any, **kwargs: Any) -> None:
            begin(this, *args, **kwargs)
            succeeds(_INCOMPLETE, self._add_batching, this)

        processor.__init__ = watched_begin

    def _add_model(self, model: Any) -> None:
        self._model = model
        self._write(
            transformers=str(importlib.import_module("transformers").__version__),
            torch=str(importlib.import_module("torch").__version__),
            model_class=type(model).__name__,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            attn_implementation=getattr(model.config, "_attn_implementation", None),
            continuous_batching=False,
        )

    def _add_batching(self, processor: Any) -> None:
        settings = {name: getattr(processor.cb_config, name, None) for name in DESCRIBED}
        self._write(
            attn_implementation=getattr(self._model.config, "_attn_implementation", None),
            continuous_batching=True,
            cb={name: value for name, value in settings.items() if value is not None},
        )

    def _write(self, **facts: Any) -> None:
        self._facts |= facts
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text(json.dumps(self._facts, indent=1), encoding="utf-8")
        partial.replace(self._path)


def forbid_prefix_caching(_: bool) -> None:
    """Make every configuration of continuous batching one that shares no blocks between requests."""
    config = importlib.import_module(CONFIGURATION).ContinuousBatchingConfig
    if not hasattr(config, "allow_block_sharing"):
        raise AttributeError("ContinuousBatchingConfig has no allow_block_sharing")
    finish = config.__post_init__

    def without_sharing(this: Any) -> None:
        finish(this)
        this.allow_block_sharing = False

    config.__post_init__ = without_sharing


def record_steps(path: str) -> None:
    StepLog(path).watch(importlib.import_module(CB_API).ContinuousBatchProcessor)


def describe(path: str) -> None:
    processor = getattr(importlib.import_module(CB_API), "ContinuousBatchProcessor", None)
    Description(path).watch(importlib.import_module(SERVING).BaseHandler, processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step-log")
    parser.add_argument("--description")
    parser.add_argument("--no-prefix-caching", action="store_true")
    words = sys.argv[1:]
    ours = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    patches: tuple[tuple[str, Any, Callable[..., None]], ...] = (
        ("prefix caching cannot be turned off", ours.no_prefix_caching, forbid_prefix_caching),
        ("the server cannot be described", ours.description, describe),
        ("steps are not recorded", ours.step_log, record_steps),
    )
    for loss, value, patch in patches:  # each by itself: one that a version lacks does not prevent the others
        if value:
            succeeds(f"{loss} with this version of transformers", patch, value)
    # Its ``main`` would first ask the network for a newer version; the command line itself is this object.
    command_line = importlib.import_module("transformers.cli.transformers").app
    sys.argv[1:] = words[words.index("--") + 1 :] if "--" in words else []
    sys.exit(command_line(prog_name="transformers"))


if __name__ == "__main__":
    main()
