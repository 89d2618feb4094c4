"""Stands in for an SGLang scheduler: loads its plugins as SGLang does and goes through scripted turns.

Reads a JSON object from standard input: ``turns``, each null where there is nothing to do, or ``rows`` with, for a
batch of prompts, ``extend`` (tokens computed), ``prefixes`` (tokens of each row computed before) and ``decoding``
(rows that decode among them); ``is_part`` for a part of a prompt, which gives no token; ``retracted`` requests that
lose their place before it. ``requests`` by name with the lengths ``prompt`` and ``limit``. ``overlap`` and
``device`` as SGLang has them; ``lacks`` names a method of batches that this version does not have; ``schedules``
is false for a process of another kind. Prints how many plugins it ran, how many tokens every request has got, and
when the last turn was over.
"""

import functools
import json
import logging
import pkgutil
import sys
import time
from collections import deque
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

STEP_S = 0.002
SAMPLE_S = 0.001
AFTERWARDS_S = 0.02


class HookRegistry:
    """Hooks around methods, as SGLang's own registry keeps and applies them."""

    hooks = []  # noqa: RUF012 - one list for the process, as there

    @classmethod
    def register(cls, target, hook, hook_type):
        assert hook_type == HookType.AROUND
        cls.hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks:
            owner, _, name = target.rpartition(".")
            method = getattr(pkgutil.resolve_name(owner), name)
            setattr(pkgutil.resolve_name(owner), name, around(method, hook))


class HookType:
    """The kind of hook that is used."""

    AROUND = "around"


def around(method, hook):
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return hook(method, *args, **kwargs)

    return wrapper


class ModelRunner:
    """Draws tokens."""

    def sample(self):
        time.sleep(SAMPLE_S)


class SchedulerOutputStreamer:
    """Sends tokens."""

    def stream_output(self, requests):
        assert requests


class ScheduleBatch:
    """One scripted batch."""

    def __init__(self, turn, requests):
        self.reqs = [requests[name] for name in turn["rows"]]
        extend = turn.get("extend")
        self.forward_mode = SimpleNamespace(is_extend=lambda: extend is not None)
        self.extend_num_tokens, self.prefix_lens = extend, turn.get("prefixes", [0])
        self.decoding_reqs = self.reqs[: turn.get("decoding", 0)] or None
        self.sampling_info = SimpleNamespace(is_all_greedy=turn.get("greedy", False))
        self.is_part = turn.get("is_part", False)

    def retract_decode(self):
        return self.reqs, 0.5, []


class Scheduler:
    """The turns of SGLang's loop, with and without overlap."""

    def __init__(self, script):
        self.requests = {
            name: SimpleNamespace(origin_input_ids=[0] * prompt, output_ids=[], finished_len=None, limit=limit)
            for name, (prompt, limit) in script["requests"].items()
        }
        self.turns = deque(script["turns"])
        self.enable_overlap, self.device = script.get("overlap", False), script.get("device", "cpu")

    def get_next_batch_to_run(self, running_batch=None, last_batch=None):
        turn = self.turns.popleft()
        if turn is None:
            time.sleep(STEP_S)
            return SimpleNamespace(batch_to_run=None)
        if "retracted" in turn:
            ScheduleBatch({"rows": turn["retracted"]}, self.requests).retract_decode()
        return SimpleNamespace(batch_to_run=ScheduleBatch(turn, self.requests))

    def run_batch(self, batch):
        time.sleep(STEP_S)
        ModelRunner().sample()
        return SimpleNamespace(batch=batch)

    def process_batch_result(self, batch, result):
        assert result.batch is batch
        for request in batch.reqs:
            if batch.is_part or request.finished_len is not None:
                continue
            request.output_ids.append(0)
            if len(request.output_ids) >= request.limit:
                request.finished_len = request.limit
        SchedulerOutputStreamer().stream_output(batch.reqs)
        time.sleep(AFTERWARDS_S)

    def run_event_loop(self):
        waiting = deque()
        while self.turns or waiting:
            batch = self.get_next_batch_to_run().batch_to_run if self.turns else None
            if batch is not None:
                waiting.append((batch, self.run_batch(batch)))
            if waiting and (len(waiting) > 1 or batch is None or not self.enable_overlap):
                self.process_batch_result(*waiting.popleft())


def module(name, **content):
    made = sys.modules[name] = ModuleType(name)
    made.__path__ = []
    vars(made).update(content)


def load_plugins():
    """As each process of SGLang does before its work."""
    found = [entry_point.load() for entry_point in entry_points(group="sglang.srt.plugins")]
    for plugin in found:
        plugin()
    HookRegistry.apply_hooks()
    return len(found)


def main():
    script = json.load(sys.stdin)
    if name := script.get("lacks"):
        delattr(ScheduleBatch, name)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.model_executor", "sglang.srt.plugins"):
        module(name)
    module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType)
    if script.get("schedules", True):
        module("sglang.srt.managers.scheduler", Scheduler=Scheduler)
    module("sglang.srt.managers.schedule_batch", ScheduleBatch=ScheduleBatch)
    module("sglang.srt.managers.scheduler_components")
    streamer = {"SchedulerOutputStreamer": SchedulerOutputStreamer}
    module("sglang.srt.managers.scheduler_components.output_streamer", **streamer)
    module("sglang.srt.model_executor.model_runner", ModelRunner=ModelRunner)
    num_plugins = load_plugins()
    scheduler = Scheduler(script)
    scheduler.run_event_loop()
    got = {name: len(request.output_ids) for name, request in scheduler.requests.items()}
    sys.stdout.write(json.dumps([num_plugins, got, time.monotonic_ns()]))


logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
main()
