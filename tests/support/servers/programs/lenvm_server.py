"""A stand-in for a server of SGLang's LenVM fork: its API, its step logs and its ways to fail, without a model.

``STAND_IN`` in the environment is a JSON object: ``revision`` (V1 or V4), ``load_s`` (how long loading the value
model takes), ``truth`` (a file that gets the body of every request), ``told`` (a value model that it claims),
``step_s``. A step gives one token to every open sequence. The first sampled batch loads the value model.
"""

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

HOW = {"revision": "V1", "load_s": 0.4, **json.loads(os.environ["STAND_IN"])}
IS_V4 = HOW["revision"] == "V4"
STEP_S = HOW.get("step_s", 0.003)


def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "model-path", "served-model-name", "host", "port", "random-seed", "context-length", "mem-fraction-static",
        "tp-size", "dp-size", "lvm-guided-inproc-model-path", "lvm-guided-inproc-json-model-override-args",
        "lvm-guided-inproc-mem-fraction-static", "lvm-guided-inproc-model-revision", "lvm-guided-fn",
        "max-running-requests",
    ):  # fmt: skip
        parser.add_argument(f"--{name}")
    for name in (
        "enable-metrics", "enable-cache-report", "disable-radix-cache", "disable-overlap-schedule",
        "disable-cuda-graph", "enable-lvm-guided-sampling", "lvm-guided-inproc",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


class Sequence:
    def __init__(self, body, index, queue):
        self.body, self.index, self.queue, self.num_tokens = body, index, queue, 0
        self.is_greedy = body["top_k"] == 1 or body["temperature"] == 0
        self.is_guided = bool(body.get("custom_params")) and not self.is_greedy


class Scheduler:
    """One step after another, each a line of the fork's timer as far as its revision has one."""

    def __init__(self, has_value_model):
        path = os.environ.get("SGLANG_LVM_TIMING_LOG")
        self.log = open(path, "a", buffering=1) if path else None  # noqa: PTH123, SIM115 - as the fork does
        self.has_value_model, self.is_loaded, self.num_steps = has_value_model, False, 0
        # The fork's own first request: greedy, eight tokens, one sequence.
        own = {"n": 1, "max_tokens": 8, "top_k": 1, "temperature": 0}
        self.running = [Sequence(own, 0, SimpleQueue())]

    def run(self):
        while True:
            time.sleep(STEP_S if self.running else 0.001)
            if self.running:
                self.step()

    def step(self):
        began = time.perf_counter()
        batch, guided = list(self.running), sum(sequence.is_guided for sequence in self.running)
        is_greedy, load_ms = all(sequence.is_greedy for sequence in batch), 0.0
        if self.has_value_model and not self.is_loaded and (guided or not (is_greedy or IS_V4)):
            self.is_loaded, load_ms = True, 1000 * HOW["load_s"]
            time.sleep(HOW["load_s"])
        for sequence in batch:
            sequence.num_tokens += 1
            sequence.queue.put((sequence, sequence.num_tokens))
            if sequence.num_tokens == sequence.body["max_tokens"]:
                self.running.remove(sequence)
        self.num_steps += 1
        if self.log is not None:
            sampler_ms = max(1000 * (time.perf_counter() - began), load_ms + 1) + 0.2
            record = self.times(guided, is_greedy, load_ms) | {"t_sampler_total_ms": sampler_ms}
            record |= {"lvm_active": bool(guided), "batch_size": len(batch), "is_greedy": is_greedy}
            self.log.write(json.dumps({"step": self.num_steps, **record}) + "\n")

    def times(self, guided, is_greedy, load_ms):
        if is_greedy:
            return {}
        record = {"t_pre_lvm_ms": 0.1, "t_sample_ms": 0.1}
        if guided:
            record |= {"t_lvm_build_pending_ms": 0.2, "lvm_n_reqs_with_guidance": guided}
            record |= {"t_lvm_forward_ms": 0.5, "t_lvm_apply_guidance_ms": 0.1}
        if not IS_V4 or self.has_value_model:
            record["t_lvm_apply_outer_ms"] = load_ms + (0.8 if guided else 0.0)
        if guided and IS_V4:
            record |= {"lvm_guided_rows": guided, "lvm_forward_rows": guided, "lvm_n_candidates": 3 * guided}
            record |= {"lvm_fused_total_extend_tokens": 4 * guided, "t_preprocess_logits_ms": 0.05}
        return record


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing: what the server prints is its log."""

    def do_GET(self):
        info = {
            "version": "0.5.7", "model_path": OPTIONS.model_path, "disable_radix_cache": True,
            "disable_overlap_schedule": OPTIONS.disable_overlap_schedule,
            "enable_lvm_guided_sampling": OPTIONS.enable_lvm_guided_sampling,
            "lvm_guided_inproc_model_path": HOW.get("told", OPTIONS.lvm_guided_inproc_model_path),
        }  # fmt: skip
        pages = {"/health": {}, "/v1/models": {}, "/server_info": info}
        self.send_response(200 if self.path in pages else 404)
        self.end_headers()
        self.wfile.write(json.dumps(pages.get(self.path)).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with Path(HOW["truth"]).open("a") as file:
            file.write(json.dumps(body) + "\n")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        queue, longest = SimpleQueue(), body["max_tokens"]
        SCHEDULER.running += [Sequence(body, index, queue) for index in range(body["n"])]
        for _ in range(body["n"] * longest):
            sequence, num_tokens = queue.get()
            text = {"delta": {"content": "t "}} if "messages" in body else {"text": "t "}
            finish = "length" if num_tokens == longest else None
            self.event([{"index": sequence.index, "finish_reason": finish, **text}], num_tokens)
        self.event([], body["n"] * longest)
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, choices, num_tokens):
        usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
        self.wfile.write(b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n")


OPTIONS = arguments()
SCHEDULER = Scheduler(OPTIONS.lvm_guided_inproc)
Thread(target=ThreadingHTTPServer((OPTIONS.host, int(OPTIONS.port)), Handler).serve_forever, daemon=True).start()
sys.stdout.write("The server is fired up and ready to roll!\n")
SCHEDULER.run()
