"""Time and memory of show, compare and the report page on large directories.

    python -m benchmarks.analysis.speed [--sections show sweep compare report] [--rounds 3]
        [--blocks 240] [--requests 64] [--tokens 128]      the directory that is shown, two answers to each request
        [--sweep-blocks 80] [--prompts 8]                  a simulated sweep of topk-sweep, six arms
        [--steps 1000000 200000] [--batch 1 16]            each of two directories that are compared, 16 runs
        [--runs 48] [--run-steps 100000]                   the directory of the page

Directories are made up, in blocks of a baseline and guided runs. ``show``: whoever reads long requests first leaves
a copy of their numbers, which is the row "first reading". ``sweep``: many small runs, shown and reported; the limit
is what msgspec takes to decode their records, and the first report finds no file of an earlier one. ``compare``:
the limit is what msgspec takes for the records of the same logs, kept by nobody; tokens have lateness, characters
and text, and steps are once lines that differ in their digits alone and once of changing forms. Nothing is left
beside the files: each reading is like the first. ``report``: seconds to read, to build the page, and to open
it in headless Chromium until the verdict is in a frame, the charts of the first window are drawn, and all charts
are, beside a page with vega.js alone. Goals: 4 MB, 3 s to the first charts.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from functools import partial
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.records.integrity import begin_digests, digests_of_run, record_run
from benchctl.report.page.page import directory_page
from benchmarks.common.harness import compared, options, write
from benchmarks.common.measured_process import spent

BENCHCTL = [sys.executable, "-m", "benchctl"]
WORD = " tok"
DECODE = """
import sys
import msgspec
from benchctl.records.record import RequestRecord
from benchctl.records.schema import StepRecord
for path in sys.argv[1:]:
    decoder = msgspec.json.Decoder(StepRecord if path.endswith("steps.jsonl") else RequestRecord)
    with open(path, "rb") as file:
        while lines := file.read(1 << 19) + file.readline():
            decoder.decode_lines(lines)
"""
DECODE_ALL = """
import sys
from pathlib import Path
import msgspec
from benchctl.records.record import RequestRecord, RunRecord
from benchctl.records.schema import StepRecord
kinds = {"requests.jsonl": RequestRecord, "steps.jsonl": StepRecord, "run.json": RunRecord}
decoders = {name: msgspec.json.Decoder(kind) for name, kind in kinds.items()}
for run in Path(sys.argv[1], "runs").iterdir():
    for name, decoder in decoders.items():
        content = (run / name).read_bytes()
        decoder.decode_lines(content) if name.endswith("l") else decoder.decode(content)
"""
DERIVED = ("derived.json", "report.html", "*summary.*", "plots/*", "runs/*/result.json")
LOGS = ("steps.jsonl", "requests.jsonl")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OBSERVER = """
    addEventListener('DOMContentLoaded', () => {
        const look = () => requestAnimationFrame(() => {
            if (document.querySelector('h1')) window.verdictMs = performance.now(); else look();
        });
        look();
    });
"""
DRAWN = """(first) => Array.from(document.querySelectorAll('[data-chart]'))
    .filter((c) => !first || c.getBoundingClientRect().top < innerHeight)
    .every((c) => c.querySelector('svg.marks'))"""


def make_directory(path, num_blocks, **sizes):
    """Blocks of a baseline and a guided run whose times scatter, with the digests that a measurement records."""
    draw = random.Random(str(path))
    blocks = [
        {"baseline": 1 + 0.02 * draw.random(), "guided": 1.05 + 0.02 * draw.random()} for _ in range(num_blocks)
    ]
    return builders.write_results(path, block_factors=blocks, **sizes)


def record_digests(results):
    begin_digests(results)
    for run in results.runs():
        run.write(msgspec.structs.replace(run.read(), files=digests_of_run(run)))
        record_run(results, run.path.name)


def show_section(asked, work):
    sizes = {"num_requests": asked.requests, "output_tokens": asked.tokens, "n": 2}
    record_digests(make_directory(work / "shown", asked.blocks, **sizes))
    show = partial(spent, [*BENCHCTL, "show", str(work / "shown")], work)
    title = f"show: {2 * asked.blocks} runs and {4 * asked.blocks * asked.requests * asked.tokens:,} tokens"
    return compared(title, {"first reading": show}) + compared(title, {"benchctl show": show}, rounds=asked.rounds)


def sweep_section(asked, work):
    swept = work / "swept"
    small = ["--set", f"workload.num_prompts={asked.prompts}", "--blocks", str(asked.sweep_blocks)]
    simulate = [*BENCHCTL, "simulate", "--profile", "topk-sweep", *small, "--quiet", "-o", str(swept)]
    spent(simulate, work, good_codes=(0, 1, 3))

    def first_report():
        for pattern in DERIVED:
            for path in swept.glob(pattern):
                path.unlink()
        return spent([*BENCHCTL, "report", str(swept)], work)

    ways = {
        "limit: decoding alone": partial(spent, [sys.executable, "-c", DECODE_ALL, str(swept)], work),
        "benchctl show": partial(spent, [*BENCHCTL, "show", str(swept)], work),
        "first report": first_report,
        "benchctl report": partial(spent, [*BENCHCTL, "report", str(swept)], work),
    }
    title = f"sweep: {6 * asked.sweep_blocks} runs of {asked.prompts} requests"
    return compared(title, ways, rounds=asked.rounds, ratios=["wall s", "cpu s"])


def tell_all(record):
    """A request whose chunks also have lateness, characters and text."""
    for choice in record["choices"]:
        count = len(choice["chunk_ns"])
        late_ns = np.random.default_rng(count).normal(60_000, 5_000, count).astype(int).tolist()
        choice |= {"chunk_late_ns": late_ns, "chunk_chars": [len(WORD)] * count, "text": WORD * count}
    return record | {"stamps": "kernel"}


def vary(record):
    """A step with flags that change from step to step, so that its neighbours are lines of another form."""
    draw = random.Random(record["start_ns"])
    return record | {"value_replayed": draw.random() < 0.5, "fused": draw.random() < 0.5}


def compare_section(asked, work):
    rows = []
    for steps, batch in zip(asked.steps, asked.batch, strict=True):
        for is_varied in (False, True):
            rows += compare_case(asked, work / f"{steps}x{batch}-{is_varied}", steps, batch, is_varied=is_varied)
    return rows


def compare_case(asked, work, steps, batch, *, is_varied):
    sides = [work / name for name in ("a", "b")]
    work.mkdir()
    for side in sides:
        results = make_directory(side, 8, num_requests=batch, output_tokens=max(1, steps // 16), n=1)
        for run in results.runs():
            builders.rewrite_lines(run.path / "requests.jsonl", tell_all)
            if is_varied:
                builders.rewrite_lines(run.path / "steps.jsonl", vary)
        record_digests(results)
    logs = sorted(str(path) for side in sides for name in LOGS for path in side.glob(f"runs/*/{name}"))
    compare = partial(spent, [*BENCHCTL, "compare", *map(str, sides)], work, good_codes=(0, 1, 3))
    ways = {
        "limit: decoding alone": partial(spent, [sys.executable, "-c", DECODE, *logs], work),
        "reading the bytes alone": partial(spent, ["cat", *logs], work),
        "benchctl compare": compare,
    }
    form = "of varying form" if is_varied else "of one form"
    title = f"compare: two directories, together {2 * steps:,} steps {form} and {2 * steps * batch:,} tokens"
    rows = compared(title, ways, rounds=asked.rounds, ratios=["wall s", "cpu s"])
    shutil.rmtree(work)
    return rows


def long_run(path, num_steps, factor):
    """Replace the steps of a run by many like them, whose times scatter and drift."""
    decode = json.loads(path.read_bytes().splitlines()[-1])
    durations = decode["dur_ns"] * factor * np.random.default_rng(1).lognormal(0, 0.05, num_steps)
    starts = np.concatenate([[0], np.cumsum(durations.astype(np.int64))[:-1]])
    sequences = np.clip(32 + 31 * np.sin(np.arange(num_steps) / 500), 1, 64).astype(int)
    counted = {"step", "start_ns", "dur_ns", "num_seqs"}
    rest = json.dumps({key: value for key, value in decode.items() if key not in counted}).removeprefix("{")
    with path.open("w") as file:
        file.writelines(
            f'{{"step":{i + 1},"start_ns":{start},"dur_ns":{int(duration)},"num_seqs":{seqs},{rest}\n'
            for i, (start, duration, seqs) in enumerate(zip(starts, durations, sequences, strict=True))
        )


def report_section(asked, work):
    cells = [{"top_k": k + 2} for k in range(max(1, asked.runs // 8 - 1))]
    results = make_directory(work / "reported", 8, cells=cells)
    for i, run in enumerate(results.runs()):
        long_run(run.path / "steps.jsonl", asked.run_steps, 1 + 0.002 * (i % 5))
    page, alone = work / "report.html", work / "limit.html"
    vega = (files("benchctl.report.page") / "vendor" / "vega.js").read_text(encoding="utf-8")
    alone.write_text(f"<!doctype html><h1>limit</h1><script>{vega}</script>")

    def built():
        start_s = time.perf_counter()
        analysis = analyze_directory(work / "reported")
        read_s = time.perf_counter() - start_s
        page.write_text(directory_page(analysis))
        build_s = time.perf_counter() - start_s - read_s
        size = {"bytes": page.stat().st_size, "vega.js bytes": alone.stat().st_size}
        return {"runs": len(results.runs()), "read s": read_s, "build s": build_s, **size}

    title = f"report: a page of {len(results.runs())} runs of {asked.run_steps:,} steps"
    rows = compared(title, {"built": built}, rounds=asked.rounds)
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        print("no Chromium is installed; scripts/browser.sh does it")
        return rows
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        ways = {"vega.js alone": partial(opened, browser, alone), "page": partial(opened, browser, page)}
        return rows + compared("opened in Chromium", ways, rounds=asked.rounds, ratios=["first charts s"])


def opened(browser, path):
    """Seconds until the verdict is seen, the charts of the first window are drawn, and all charts are."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.add_init_script(OBSERVER)
    page.goto(path.as_uri(), wait_until="commit")
    wait_until(page, "window.verdictMs")
    wait_until(page, DRAWN, True)
    first_s = page.evaluate("performance.now()") / 1000
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    wait_until(page, DRAWN, False)
    seconds = {"verdict s": page.evaluate("window.verdictMs") / 1000, "first charts s": first_s}
    seconds["all charts s"] = page.evaluate("performance.now()") / 1000
    page.close()
    return seconds


def wait_until(page, expression, *arguments):
    """Wait for a condition from outside the page, whose content security policy refuses conditions as text."""
    while not page.evaluate(expression, *arguments):
        time.sleep(0.005)


SECTIONS = {"show": show_section, "sweep": sweep_section, "compare": compare_section, "report": report_section}


def main():
    asked = options(
        __doc__,
        sections=list(SECTIONS),
        rounds=3,
        blocks=240,
        requests=64,
        tokens=128,
        sweep_blocks=80,
        prompts=8,
        steps=[1_000_000, 200_000],
        batch=[1, 16],
        runs=48,
        run_steps=100_000,
    )
    with tempfile.TemporaryDirectory() as work:
        write(asked.json, {section: SECTIONS[section](asked, Path(work)) for section in asked.sections})


if __name__ == "__main__":
    main()
