"""Everything that benchctl prints and writes about some result directories, kept for a comparison with other code.

    python -m benchmarks.outputs.store OUT [--from DIR_OF_RESULT_DIRECTORIES] [--vllm]

Without --from, OUT/directories gets about thirty result directories (directories.py), whose commands' output is in
OUT/made; with it, those that are given are read. OUT/outputs gets the output of all commands that read them, and of
the calculators: standard output as NAME.txt or NAME.json, exit code and standard error as NAME.err, and the files
that a command writes; of a page only its tables. `differences` compares two stores. Two commands run at a time, in
forks of one process that has imported benchctl; paths, moments and versions are masked. --vllm also measures a vLLM
server of this machine (`benchctl engines install vllm`).
"""

import argparse
import os
import pkgutil
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from html.parser import HTMLParser
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import benchctl
from benchmarks.outputs import directories
from benchmarks.outputs.commands import run_unit

ROOM_OF_PATHS = r"(?:directories|inputs|home|outputs|work)"
MASKS = (
    (re.compile(rf"(?:/[\w.-]+)+/(?={ROOM_OF_PATHS}\b)"), "<out>/"),
    (re.compile(re.escape(str(Path(__file__).parents[2]))), "<checkout>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d\b(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?Z?)?"), "<moment>"),
    (re.compile(r"\b\d{8}T\d{6}Z(?:-[0-9a-f]{8}\b)?"), "<moment>"),
    (re.compile(r"\bbenchctl \d+\.\d+\.\d+(?: \([0-9a-f]+(?:, [^)]*)?\))?"), "benchctl <version>"),
    (re.compile(r'("benchctl_(?:version|commit)": )"[^"]*"'), r'\1"<version>"'),
    (re.compile(r"\((?:today|yesterday|\d+ days? ago)\)"), "(<age>)"),
    (re.compile(r'("git": )(?:null|\{[^{}]*\})'), r"\1null"),
    (re.compile(r"(\[\d+/\d+\] \S+: \w+ in )[\d.]+ s"), r"\1<duration>"),
)


def commands_on(name):
    """What reads one result directory; files are written below ../outputs/NAME."""
    out = f"../outputs/{name}"
    return {
        "show.txt": ["show", name],
        "show.json": ["show", name, "--json"],
        "show-suspect.txt": ["show", name, "--allow-suspect"],
        "compare.txt": ["compare", name],
        "compare.json": ["compare", name, "--json"],
        "compare-all.txt": ["compare", name, "--all", "-o", f"{out}/compare.csv", "-o", f"{out}/compare.md"],
        "report.txt": ["report", name, "-o", f"{out}/report"],
        "verify.txt": ["verify", name],
        **{
            f"export-{form}.txt": ["export", name, "--format", form, "-o", f"{out}/export-{form}"]
            for form in ("vllm", "aiperf", "lenvm")
        },
    }


def commands_once():
    """Groups of what needs no directory, or certain ones. The commands of a group run one after the other."""
    foreign = directories.CHECKOUT / "tests/interop/foreign"
    tables = ["steptime-w1", "steptime-w3", "steptime-w4"]
    step = ["steptime", "predict", "model.json", "--model", "qwen2.5-7b"]
    guided = ["compare", "topk-sweep", "--all"]
    drafts = ["speculation", "--acceptance", "0.8", "--draft-tokens", "1..6"]
    served = [*drafts, "--model", "qwen2.5-7b", "--draft-model", "qwen2.5-0.5b", "--hardware", "h100-sxm"]
    smoke = ["--profile", "ci-smoke", "--blocks", "6"]
    return {
        "simulated": {
            "simulate.json": ["simulate", *smoke, "--json", "-o", "simulated"],
            "simulate-draws.txt": ["simulate", "-p", "aa", "--blocks", "2", "-q", "-o", "simulated-aa"],
            "sweep.txt": ["simulate", "sweep", "-p", "ci-smoke", "--rate", "4,8", "--slo", "p50_tpot_ms=12"],
            "sweep.json": ["simulate", "sweep", "-p", "ci-smoke", "--max-concurrency", "2,4", "--json"],
            "largest.txt": [
                *("simulate", "sweep", "-p", "ci-smoke"),
                "--largest",
                "rate",
                "--slo",
                "p50_tpot_ms=13",
            ],
            "dry-run.txt": ["run", "topk-sweep", "--dry-run"],
            "profiles.txt": ["profiles", "list"],
        },
        "steptime": {
            "fit.txt": ["steptime", "fit", *tables, "-o", "model.json"],
            "fit.json": ["steptime", "fit", *tables, "--structure", "original", "--json"],
            "evaluate.txt": ["steptime", "evaluate", *tables],
            "diagnose.json": ["steptime", "diagnose", *tables, "--json"],
            "diagnose.txt": ["steptime", "diagnose", *tables],
            "predict.txt": [*step, "--batch", "8", "--prefill", "512"],
            "predict.json": [*step, "--batch", "8", "--context", "2000", "--json"],
            "calibrate.txt": ["steptime", "calibrate", "model.json", "steptime-v1", "-o", "carried.json"],
            "compare-explained.txt": ["compare", "flag", "--all", "--step-time-model", "model.json"],
            "speculation.txt": [*served[:-2], "--step-time-model", "model.json"],
            "dry-run.txt": ["run", "ci-smoke", "--dry-run", "--step-time-model", "model.json"],
        },
        "calculators": {
            "guided.txt": ["steptime", "guided"],
            "guided.json": ["steptime", "guided", "--json", "--scoring", "two-phase"],
            "speculation.txt": drafts,
            "speculation.json": [*served, "--rate", "1,2", "--json"],
            "speculation-served.txt": [*served, "--rate", "1,2"],
            "speculation-directory.txt": ["speculation", "speculation"],
            "speculation-directory.json": ["speculation", "speculation", "--json"],
            "flops.txt": ["flops", "--wall", "100"],
            "flops.json": ["flops", "--json", "--observed-candidates", "3"],
            "roofline.txt": ["micro", "roofline", "--show"],
            "noise-show.txt": ["noise", "show", "aa"],
            "noise-add.txt": ["noise", "add", "aa"],
            "noise-list.json": ["noise", "list", "--json"],
            "list.txt": ["list", "."],
            "list.json": ["list", ".", "--json"],
        },
        "sides": {
            "mean.txt": [*guided, "--estimator", "mean", "--confidence", "0.9"],
            "robust.txt": [*guided, "--estimator", "robust", "--threshold", "3%", "--equivalence-margin", "5%"],
            "noise.txt": [*guided, "--noise-floor", "aa"],
            "quality.txt": ["compare", "example", "--all", "--quality-margin", "5", "--judge", "numeric"],
            "suspect.txt": ["compare", "measured", "--all", "--allow-suspect"],
            "metrics.txt": ["compare", "flag", "--metrics", "p95_ttft_ms,output_throughput"],
            "arms.txt": ["compare", "flag:baseline", "flag:baseline", "--all"],
            "directories.txt": ["compare", "ci-smoke", "flag", "--all", "--allow-difference", "*"],
            "report-sides.txt": [
                "report",
                "flag:baseline",
                "ci-smoke:baseline",
                "-o",
                "../outputs/sides/page.html",
            ],
            "files.txt": ["compare", foreign / "vllm-0.json", foreign / "vllm-1.json", "--all"],
            "files.json": ["compare", foreign / "vllm-0.json", foreign / "vllm-1.json", "--json"],
            "same-file.txt": ["compare", foreign / "guidellm.json", foreign / "guidellm.json"],
            "exported.txt": ["compare", "exported/baseline", "exported/guided-top_k5", "--all"],
            "archive.txt": ["export", "flag", "--archive", "flag.tar.gz"],
            "show-archive.txt": ["show", "flag.tar.gz"],
        },
    }


class Tables(HTMLParser):
    """Text of the tables of a page: a line for each row, with ` | ` between cells."""

    def __init__(self):
        super().__init__()
        self.depth, self.lines = 0, []

    def handle_starttag(self, tag, _attributes):
        self.depth += tag == "table"
        if self.depth and tag == "tr":
            self.lines.append([])
        if self.depth and tag in {"td", "th"} and self.lines:
            self.lines[-1].append("")

    def handle_endtag(self, tag):
        self.depth -= tag == "table"

    def handle_data(self, data):
        if self.depth and self.lines and self.lines[-1]:
            self.lines[-1][-1] += data


def masked(text):
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return text


def tidy(folder):
    """Leave texts, without what differs from machine to machine and from day to day, and of pages the tables."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.suffix in {".png", ".tar", ".gz", ".zst"}:
            path.unlink()
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".html":
            tables = Tables()
            tables.feed(text)
            path.unlink()
            text = "".join(" | ".join(" ".join(cell.split()) for cell in row) + "\n" for row in tables.lines)
        kept = path.with_suffix(".tables.txt") if path.suffix == ".html" else path
        kept.write_text(masked(text), encoding="utf-8")


def isolate(out):
    """An environment in which nothing of this user and this terminal counts."""
    for name in [name for name in os.environ if name.startswith(("BENCHCTL_", "XDG_", "GITHUB_", "SLURM_"))]:
        del os.environ[name]
    os.environ.update(HOME=str(out / "home"), COLUMNS="200", LINES="50", TERM="dumb", NO_COLOR="1", TZ="UTC")
    os.environ["MPLCONFIGDIR"] = str(out / "home/matplotlib")


def import_all():
    """All of benchctl that this environment can import; forks then begin at once."""
    for module in pkgutil.walk_packages(benchctl.__path__, "benchctl.", onerror=lambda _: None):
        if not re.search(r"__main__|\.inside|guided|slurm", module.name):
            try:
                import_module(module.name)
            except ImportError:
                continue


def run_units(units):
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        for ended in as_completed([pool.submit(run_unit, unit) for unit in units]):
            print(f"  {ended.result()}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--from", dest="source", type=Path, help="directory of result directories to read")
    parser.add_argument("--vllm", action="store_true", help="also measure vLLM on this machine's CPU")
    options = parser.parse_args()
    out, engines = options.out.resolve(), Path.home() / ".cache/benchctl/engines"
    if (out / "outputs").exists():
        sys.exit(f"{out / 'outputs'} exists; name another directory, or delete it")
    kept = options.source.resolve() if options.source else out / "directories"
    (out / "home").mkdir(parents=True, exist_ok=True)
    isolate(out)
    import_all()
    if options.source is None:
        print("making result directories", flush=True)
        kept.mkdir()
        run_units(directories.units(out, engines if options.vllm else None))
        directories.change_copies(kept)
        tidy(out / "made")
    print("storing outputs", flush=True)
    work = out / "work"  # commands may write into what they read
    shutil.copytree(kept, work, symlinks=True)
    names = sorted(path.name for path in kept.iterdir())
    once = commands_once()
    groups = {"sides": once["sides"], "simulated": once["simulated"], "steptime": once["steptime"]}
    groups |= {name: commands_on(name) for name in names} | {"calculators": once["calculators"]}
    groups["sides"] = {
        "export.txt": ["export", "topk-sweep", "--format", "vllm", "-o", "exported"],
        **groups["sides"],
    }
    run_units([(name, each, work, out / "outputs" / name, out / "home" / name) for name, each in groups.items()])
    tidy(out / "outputs")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
