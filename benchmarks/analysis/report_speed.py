"""What the report page of a large experiment costs: to build, to keep, and to open in a browser.

    python -m benchmarks.analysis.report_speed [--runs N] [--steps N] [--json FILE]

The directory is made up: a baseline and guided cells in blocks, with as many steps for each run. Times to open are
those of headless Chromium from the start of the navigation, best of --repeats; the limit is a page that holds
nothing but vega.js. "verdict" is the first frame with the verdict in it, "first charts" is when every chart that
lies in the first window, if any, has been drawn, and "all charts" the same for the whole page.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.results import builders

from benchctl.analysis.analyzed import analyze_directory
from benchctl.report.page.page import directory_page

VEGA = files("benchctl.report.page") / "vendor" / "vega.js"
NUM_BLOCKS = 8
MOST_BYTES = 4_000_000
MOST_OPEN_S = 3.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OBSERVER = """
    addEventListener('DOMContentLoaded', () => {
        const shown = () => {
            requestAnimationFrame(() => {
                if (document.querySelector('h1')) window.verdictMs = performance.now();
                else shown();
            });
        };
        shown();
    });
"""
DRAWN = """(first) => Array.from(document.querySelectorAll('[data-chart]'))
    .filter((c) => !first || c.getBoundingClientRect().top < innerHeight)
    .every((c) => c.querySelector('svg.marks'))"""


def long_run(path, num_steps, factor):
    """Replace the steps of a run by many like them, whose times scatter and drift."""
    lines = path.read_bytes().splitlines()
    decode = json.loads(lines[-1])
    stream = np.random.default_rng(1)
    durations = (decode["dur_ns"] * factor * stream.lognormal(0, 0.05, num_steps)).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(durations)[:-1]])
    sequences = np.clip(32 + 31 * np.sin(np.arange(num_steps) / 500), 1, 64).astype(int)
    counted = {"step", "start_ns", "dur_ns", "num_seqs"}
    rest = json.dumps({key: value for key, value in decode.items() if key not in counted}).removeprefix("{")
    with path.open("w") as file:
        file.writelines(
            f'{{"step":{i + 1},"start_ns":{start},"dur_ns":{duration},"num_seqs":{seqs},{rest}\n'
            for i, (start, duration, seqs) in enumerate(zip(starts, durations, sequences, strict=True))
        )


def make_directory(path, num_runs, num_steps):
    cells = max(1, num_runs // NUM_BLOCKS - 1)
    factors = [{"baseline": 1 + 0.01 * (i % 3), "guided": 1 + 0.01 * (i % 4)} for i in range(NUM_BLOCKS)]
    results = builders.write_results(path, block_factors=factors, cells=[{"top_k": k + 2} for k in range(cells)])
    for i, run in enumerate(results.runs()):
        long_run(run.path / "steps.jsonl", num_steps, 1 + 0.002 * (i % 5))
    return len(results.runs())


def wait_until(page, expression, *arguments):
    """Wait for a condition from outside the page, whose content security policy refuses conditions as text."""
    while not page.evaluate(expression, *arguments):
        time.sleep(0.005)


def opened(browser, path):
    """Seconds until the verdict is seen, the charts of the first window are drawn, and all charts are."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.add_init_script(OBSERVER)
    page.goto(path.as_uri(), wait_until="commit")
    wait_until(page, "window.verdictMs")
    wait_until(page, DRAWN, True)
    first_s = page.evaluate("performance.now()") / 1000
    verdict_s = page.evaluate("window.verdictMs") / 1000
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    wait_until(page, DRAWN, False)
    all_s = page.evaluate("performance.now()") / 1000
    page.close()
    return {"verdict s": verdict_s, "first charts s": first_s, "all charts s": all_s}


def limit_opened(browser, path):
    """Seconds until a page that holds only vega.js has run it."""
    page = browser.new_page()
    page.goto(path.as_uri(), wait_until="commit")
    page.wait_for_function("typeof vegaEmbed !== 'undefined'")
    seconds = page.evaluate("performance.now()") / 1000
    page.close()
    return seconds


def measured(directory, options):
    num_runs = make_directory(directory / "results", options.runs, options.steps)
    start_s = time.perf_counter()
    analysis = analyze_directory(directory / "results")
    read_s = time.perf_counter() - start_s
    text = directory_page(analysis)
    build_s = time.perf_counter() - start_s - read_s
    page, limit = directory / "report.html", directory / "limit.html"
    page.write_text(text)
    limit.write_text(f"<!doctype html><h1>limit</h1><script>{VEGA.read_text(encoding='utf-8')}</script>")
    row = {
        "runs": num_runs,
        "steps": num_runs * options.steps,
        "read s": read_s,
        "build s": build_s,
        "bytes": page.stat().st_size,
        "vega.js bytes": limit.stat().st_size,
    }
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        return row | {"failed": "no Chromium is installed; scripts/browser.sh does it"}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        times = [opened(browser, page) for _ in range(options.repeats)]
        row |= {name: min(found[name] for found in times) for name in times[0]}
        row["vega.js alone s"] = min(limit_opened(browser, limit) for _ in range(options.repeats))
        browser.close()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=48)
    parser.add_argument("--steps", type=int, default=100_000, help="for each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        row = measured(Path(directory), options)
    for name, value in row.items():
        shown = (
            f"{value:>14,.2f}" if isinstance(value, float) else f"{value:>14,}" if isinstance(value, int) else value
        )
        print(f"{name:<20} {shown}")
    print(f"{'size / vega.js':<20} {row['bytes'] / row['vega.js bytes']:>14.2f}   (limit {MOST_BYTES:,} bytes)")
    if "first charts s" in row:
        ratio = row["first charts s"] / row["vega.js alone s"]
        print(f"{'open / vega.js':<20} {ratio:>14.2f}   (limit {MOST_OPEN_S:g} s)")
    if options.json:
        options.json.write_text(json.dumps(row, indent=1) + "\n")
    within = row["bytes"] < MOST_BYTES and row.get("first charts s", 0.0) < MOST_OPEN_S
    print("within its limits" if within else "BEYOND its limits")


if __name__ == "__main__":
    main()
