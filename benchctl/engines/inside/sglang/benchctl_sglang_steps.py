"""Runs inside an SGLang server: writes one line of JSON for each step of its scheduler.

SGLang finds this directory's entry point of the group ``sglang.srt.plugins`` on ``PYTHONPATH`` and calls
``register`` in each of its processes. In those that schedule, six methods get a hook around them. The file is
named by ``BENCHCTL_STEP_LOG``; without it nothing is done. The ranks of a tensor-parallel server go through the
same batches at the same time: the one that creates the file records, the others leave it alone.

A line is one batch, written when it is complete, with the fields of a step record of benchctl
(``records/schema.py``):

**Time**, on CLOCK_MONOTONIC. A step ends when its tokens are about to be sent. It starts when the previous step
ended, if the scheduler has not been idle since; otherwise when the turn of the loop began that chose its batch.
Such steps do not overlap and leave no gap while there is work: sending the tokens of the step before, taking in
requests, scheduling, the model and sampling are all inside. Where the scheduler works while the device does
(SGLang's default), the device computes a batch while the host hands out the one before, and the time between two
such moments is what a token takes; on the CPU, where nothing goes on beside the host, it is then the next batch
whose computation falls into a step. Its sections are those of the turn that chose it, so an overlapping scheduler
has none; ``model_forward`` and ``sampler_total`` stand only on the CPU, where a call lasts as long as its work.

**Tokens.** ``num_seqs`` rows; ``num_prefill_tokens`` and ``num_decode_tokens`` computed in it; ``context_tokens``
the sum of contexts with what was computed. ``output_tokens`` are those by which the answers grew: their sum is the
usage. Rows of requests that have ended, which an overlapping scheduler learns one batch late, count in
``num_seqs`` and not there; a drafted token counts once it is part of an answer. The first request of several
choices (``n``) is computed once more for its prompt alone: that step has no output. ``preempted`` requests lost
their place since the line before.

Nothing here may harm the server: at the first error one warning goes to its log, and nothing is written from
then on.
"""

import importlib
import json
import logging
import os
import pkgutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

_log = logging.getLogger("sglang.benchctl_step_log")

_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


class StepLog:
    """Watches one scheduler. All its methods run in the thread of the scheduler's loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        self._is_silent = False
        self._is_idle = True
        self._began_ns = self._schedule_ns = self._sampler_ns = 0
        self._ended_ns: int | None = None
        """When the tokens of the batch that is handed out were about to be sent."""
        self._last_end_ns = self._count = self._preempted = 0
        self._launched: deque[tuple[Any, dict[str, Any]]] = deque()
        """Launched batches whose tokens were not handed out yet: their results and steps."""

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """Each watched method and its replacement, which takes the method itself as its first argument."""
        return {
            f"{_SCHEDULER}.Scheduler.get_next_batch_to_run": self.schedule,
            f"{_SCHEDULER}.Scheduler.run_batch": self.launch,
            f"{_SCHEDULER}.Scheduler.process_batch_result": self.hand_out,
            f"{_STREAMER}.stream_output": self.send,
            f"{_BATCH}.retract_decode": self.retract,
            f"{_RUNNER}.sample": self.sample,
        }

    def schedule(self, choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A turn of the loop begins: it chooses the next batch, or finds none."""
        began_ns = time.monotonic_ns()
        plan = choose(*args, **kwargs)
        self._try(self._chosen, began_ns, plan)
        return plan

    def _chosen(self, began_ns: int, plan: Any) -> None:
        self._began_ns, self._schedule_ns = began_ns, time.monotonic_ns() - began_ns
        if getattr(plan, "batch_to_run", plan) is None:  # the batch itself in earlier versions
            self._is_idle = True

    def launch(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch is given to the device; on the CPU this computes it."""
        self._sampler_ns, start_ns = 0, time.monotonic_ns()
        result = run(*args, **kwargs)
        self._try(self._note, args, result, time.monotonic_ns() - start_ns)
        return result

    def _note(self, given: tuple[Any, ...], result: Any, compute_ns: int) -> None:
        """Keep the composition of the batch, which changes until its tokens are handed out."""
        scheduler, batch = given[:2]
        sections = {} if scheduler.enable_overlap else {"schedule": self._schedule_ns}
        if sections and str(scheduler.device) == "cpu":
            sections["model_forward"] = max(compute_ns - self._sampler_ns, 0)
            sections["sampler_total"] = self._sampler_ns
        step = {
            "clock": "host",
            "start_ns": self._began_ns if self._is_idle else 0,  # at least the end of the step before
            "preempted": self._preempted,
            "is_greedy": bool(batch.sampling_info.is_all_greedy),
            "sections_ns": sections,
            **work_of(batch),
        }
        self._is_idle, self._preempted = False, 0
        self._launched.append((result, step))

    def hand_out(self, process: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The tokens of a batch go to its requests."""
        self._try(self._count_before, args)
        returned = process(*args, **kwargs)
        self._try(self._write, args)
        return returned

    def _count_before(self, given: tuple[Any, ...]) -> None:
        self._ended_ns, (_, batch, result) = None, given
        while self._launched and self._launched[0][0] is not result:
            self._launched.popleft()  # its result was dropped, as that of a batch without rows may be
        if self._launched:
            step = self._launched[0][1]
            step["output_tokens"] = -answered(batch.reqs)
            if not step["num_prefill_tokens"]:
                # Tokens of the requests until now, those of their prompts included
                step["context_tokens"] = sum(
                    len(each.origin_input_ids) + len(each.output_ids) for each in batch.reqs
                )

    def send(self, stream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Tokens are sent; what follows, such as giving memory back, is done while they are on their way."""
        if self._ended_ns is None:
            self._ended_ns = time.monotonic_ns()
        return stream(*args, **kwargs)

    def _write(self, given: tuple[Any, ...]) -> None:
        ended_ns, (_, batch, result) = self._ended_ns or time.monotonic_ns(), given
        if not self._launched or self._launched[0][0] is not result:
            return
        _, step = self._launched.popleft()
        step["output_tokens"] += answered(batch.reqs)
        step["start_ns"] = max(step["start_ns"], self._last_end_ns)
        step |= {"step": self._count, "dur_ns": max(ended_ns - step["start_ns"], 0)}
        self._last_end_ns, self._count = ended_ns, self._count + 1
        if self._file is None:
            self._open()
        line = json.dumps(step, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if not self._is_silent and os.write(self._file, line) != len(line):  # type: ignore[arg-type]
            raise OSError("a line could be written only in part; the disk may be full")

    def _open(self) -> None:
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(self._path, how, 0o644)
        except FileExistsError:
            self._is_silent = True
            _log.info("another process of this server records its steps")

    def retract(self, push_out: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Requests lose their place in the KV cache, and will be computed again."""
        pushed_out = push_out(*args, **kwargs)
        self._try(self._add_preempted, pushed_out)
        return pushed_out

    def _add_preempted(self, pushed_out: Any) -> None:
        self._preempted += len(pushed_out[0])

    def sample(self, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Tokens are drawn; what this takes is known only where a call waits for its work."""
        start_ns = time.monotonic_ns()
        drawn = draw(*args, **kwargs)
        self._sampler_ns += time.monotonic_ns() - start_ns
        return drawn

    def _try(self, action: Callable[..., None], *given: Any) -> None:
        """Run ``action``; the first error is logged, then this log is silent. No error reaches the server."""
        if self._is_silent:
            return
        try:
            action(*given)
        except Exception as error:  # noqa: BLE001 - a measurement must not end what it measures
            self._is_silent = True
            self._launched.clear()
            _log.warning("benchctl records no more steps of this server: %s: %s", type(error).__name__, error)


def work_of(batch: Any) -> dict[str, Any]:
    """Rows and tokens of a batch that was just launched; decoding rows may stand among those of prompts."""
    num_seqs = len(batch.reqs)
    if not batch.forward_mode.is_extend():
        return {"phase": "decode", "num_seqs": num_seqs, "num_prefill_tokens": 0, "num_decode_tokens": num_seqs}
    decoding = len(batch.decoding_reqs or ())
    computed = int(batch.extend_num_tokens)
    is_all_decoding = computed == decoding
    return {
        "phase": "decode" if is_all_decoding else "mixed" if decoding else "prefill",
        "num_seqs": num_seqs,
        "num_prefill_tokens": computed - decoding,
        "num_decode_tokens": decoding,
        "context_tokens": sum(batch.prefix_lens) + computed,
    }


def answered(requests: Iterable[Any]) -> int:
    """Tokens that the answers of these requests hold, without what was computed beyond their ends."""
    return sum(len(each.output_ids) if each.finished_len is None else each.finished_len for each in requests)


def register() -> None:
    """Called by SGLang in each of its processes, before it starts its work there."""
    path = os.environ.get("BENCHCTL_STEP_LOG")
    if path is None or _SCHEDULER not in sys.modules:
        return
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks = StepLog(path).hooks()
    try:
        for target in hooks:
            pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        _log.warning("benchctl cannot record the steps of this version of SGLang: %s", error)
        return
    for target, hook in hooks.items():
        registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
