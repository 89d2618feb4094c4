"""A stand-in for a server of SGLang's LenVM fork: its API, its step logs and its ways to fail, without a model.

``STAND_IN`` in the environment is a JSON object: ``revision`` (V1, V2, V4), ``load_s`` (how long loading the value
model takes, 0.4), ``truth`` (a file that gets the body of every request), ``told`` (a value model that it claims).
A step of a few milliseconds gives one token to every open sequence. The first sampled batch loads the value model.
"""
# ruff: noqa: T201 - what it prints is a server's log

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

HOW = json.loads(os.environ.get("STAND_IN", "{}"))
REVISION = HOW.get("revision", "V1")
STEP_S = 0.003


def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "model-path", "served-model-name", "host", "random-seed", "context-length", "mem-fraction-static",
        "tp-size", "dp-size", "lvm-guided-inproc-model-path", "lvm-guided-inproc-json-model-override-args",
        "lvm-guided-inproc-mem-fraction-static", "lvm-guided-inproc-model-revision", "lvm-guided-fn",
        "max-running-requests",
    ):  # fmt: skip
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int)
    for name in (
        "enable-metrics", "enable-cache-report", "disable-radix-cache", "disable-overlap-schedule",
        "disable-cuda-graph", "enable-lvm-guided-sampling", "lvm-guided-inproc",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def keep(body):
    """Write down what was asked."""
    if truth := HOW.get("truth"):
        with Path(truth).open("a") as file:
            file.write(json.dumps(body) + "\n")


class Timer:
    """The fork's timer, as far as each revision has one."""

    def __init__(self):
        path = os.environ.get("SGLANG_LVM_TIMING_LOG")
        has_lines = path and REVISION in {"V1", "V4"}
        self.log = open(path, "a", buffering=1) if has_lines else None  # noqa: PTH123, SIM115 - as the fork does
        self.is_printing = REVISION == "V2" and os.environ.get("SGLANG_LVM_TIMING") == "1"
        self.interval = int(os.environ.get("SGLANG_LVM_TIMING_INTERVAL", "200"))
        self.step, self.total_ms = 0, 0.0

    def tell(self, *, batch_size, guided, is_greedy, has_value_model, load_ms, sampler_ms):
        self.step += 1
        self.total_ms += sampler_ms
        if self.is_printing and self.step % self.interval == 0:
            mean = self.total_ms / self.step
            print(f"[sampler_timing] calls={self.step} guided={self.step} sampler_forward={mean:.3f}ms", flush=True)
        if self.log is None:
            return
        record = {"step": self.step}
        if not is_greedy:
            record["t_pre_lvm_ms"] = 0.1
            if guided:
                record |= {"t_lvm_build_pending_ms": 0.2, "lvm_n_reqs_with_guidance": guided}
                record |= {"t_lvm_forward_ms": 0.5, "t_lvm_apply_guidance_ms": 0.1}
            if REVISION != "V4" or has_value_model:
                record["t_lvm_apply_outer_ms"] = load_ms + (0.8 if guided else 0.0)
            record["t_sample_ms"] = 0.1
        if guided and REVISION == "V4":
            record |= {"lvm_guided_rows": guided, "lvm_forward_rows": guided, "lvm_n_candidates": 3 * guided}
            record |= {"lvm_fused_total_extend_tokens": 4 * guided, "t_preprocess_logits_ms": 0.05}
        record |= {"t_sampler_total_ms": sampler_ms, "lvm_active": bool(guided), "batch_size": batch_size}
        self.log.write(json.dumps(record | {"is_greedy": is_greedy}) + "\n")


class Sequence:
    def __init__(self, body, index, queue):
        self.body, self.index, self.queue, self.num_tokens = body, index, queue, 0

    @property
    def is_guided(self):
        return bool(self.body.get("custom_params")) and not self.is_greedy

    @property
    def is_greedy(self):
        return self.body["top_k"] == 1 or self.body["temperature"] == 0


class Scheduler:
    def __init__(self, options):
        self.options, self.timer, self.running = options, Timer(), []
        self.is_loaded = False

    async def run(self):
        while True:
            await asyncio.sleep(STEP_S if self.running else 0.001)
            if self.running:
                self.step()

    def step(self):
        began = time.perf_counter()
        batch, guided = self.running, [sequence for sequence in self.running if sequence.is_guided]
        is_greedy = all(sequence.is_greedy for sequence in batch)
        load_ms = self.load() if self.must_load(is_greedy, guided) else 0.0
        for sequence in batch:
            sequence.num_tokens += 1
            sequence.queue.put_nowait(sequence)
        self.running = [sequence for sequence in batch if sequence.num_tokens < sequence.body["max_tokens"]]
        sampler_ms = 1000 * (time.perf_counter() - began) + 0.2
        self.timer.tell(
            batch_size=len(batch),
            guided=len(guided),
            is_greedy=is_greedy,
            has_value_model=self.options.lvm_guided_inproc,
            load_ms=load_ms,
            sampler_ms=max(sampler_ms, load_ms + 1.2),
        )

    def must_load(self, is_greedy, guided):
        wanted = guided if REVISION in {"V2", "V4"} else not is_greedy
        return bool(wanted) and self.options.lvm_guided_inproc and not self.is_loaded

    def load(self):
        self.is_loaded = True
        time.sleep(HOW.get("load_s", 0.4))
        return 1000 * HOW.get("load_s", 0.4)


class Server:
    def __init__(self, options):
        self.options, self.scheduler = options, Scheduler(options)

    async def connected(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self.respond(head[0].split()[1], body, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def respond(self, path, body, writer):
        if path in {"/v1/completions", "/v1/chat/completions"}:
            await self.answer(json.loads(body), writer, is_chat="chat" in path)
            return
        pages = {"/health": {}, "/v1/models": {}, "/server_info": self.info()}
        content = json.dumps(pages.get(path, {})).encode()
        status = "200 OK" if path in pages else "404 Not Found"
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)

    def info(self):
        options = vars(self.options)
        return {
            "version": "0.5.7", "model_path": options["model_path"], "disable_radix_cache": True,
            "disable_overlap_schedule": options["disable_overlap_schedule"],
            "enable_lvm_guided_sampling": options["enable_lvm_guided_sampling"],
            "lvm_guided_inproc_model_path": HOW.get("told", options["lvm_guided_inproc_model_path"]),
        }  # fmt: skip

    async def answer(self, body, writer, *, is_chat):
        keep(body)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        queue = asyncio.Queue()
        for index in range(body["n"]):
            self.scheduler.running.append(Sequence(body, index, queue))
        for _ in range(body["n"] * body["max_tokens"]):
            sequence = await queue.get()
            is_last = sequence.num_tokens == body["max_tokens"]
            said = {"delta": {"content": "t "}} if is_chat else {"text": "t "}
            choice = {"index": sequence.index, "finish_reason": "length" if is_last else None, **said}
            usage = {"prompt_tokens": 7, "completion_tokens": sequence.num_tokens}
            self.event(writer, {"choices": [choice], "usage": usage})
            await writer.drain()
        self.event(
            writer,
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": body["n"] * body["max_tokens"]}},
        )
        self.data(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def event(self, writer, document):
        self.data(writer, b"data: " + json.dumps(document).encode() + b"\n\n")

    def data(self, writer, content):
        writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


async def main():
    options = arguments()
    server = Server(options)
    listener = await asyncio.start_server(server.connected, options.host, options.port)
    # The fork's own first request: greedy, eight tokens, one sequence.
    own = {"n": 1, "max_tokens": 8, "top_k": 1, "temperature": 0}
    server.scheduler.running.append(Sequence(own, 0, asyncio.Queue()))
    print("The server is fired up and ready to roll!", flush=True)
    async with listener:
        await server.scheduler.run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
