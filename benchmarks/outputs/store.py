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
import shlex
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from html.parser import HTMLParser
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import benchctl
from benchmarks.outputs import directories

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
    return parsed(f"""
        show.txt            show {name}
        show.json           show {name} --json
        show-suspect.txt    show {name} --allow-suspect
        compare.txt         compare {name}
        compare.json        compare {name} --json
        compare-all.txt     compare {name} --all -o {out}/compare.csv -o {out}/compare.md
        report.txt          report {name} -o {out}/report
        verify.txt          verify {name}
        export-vllm.txt     export {name} --format vllm -o {out}/export-vllm
        export-aiperf.txt   export {name} --format aiperf -o {out}/export-aiperf
        export-lenvm.txt    export {name} --format lenvm -o {out}/export-lenvm
    """)


def parsed(lines):
    """Arguments by the file that gets the output."""
    words = [shlex.split(line) for line in lines.splitlines() if line.strip()]
    return {file: arguments for file, *arguments in words}


FOREIGN = shlex.quote(str(directories.CHECKOUT / "tests/interop/foreign"))
TABLES = "steptime-w1 steptime-w3 steptime-w4"
STEP = "steptime predict model.json --model qwen2.5-7b"
DRAFTS = "speculation --acceptance 0.8 --draft-tokens 1..6"
DRAFTED = f"{DRAFTS} --model qwen2.5-7b --draft-model qwen2.5-0.5b"
SERVED = f"{DRAFTED} --hardware h100-sxm"
SWEEP = "simulate sweep -p ci-smoke"
COMMANDS = {
    "sides": f"""
        export.txt          export topk-sweep --format vllm -o exported
        mean.txt            compare topk-sweep --all --estimator mean --confidence 0.9
        robust.txt          compare topk-sweep --all --estimator robust --threshold 3% --equivalence-margin 5%
        noise.txt           compare topk-sweep --all --noise-floor aa
        quality.txt         compare example --all --quality-margin 5 --judge numeric
        suspect.txt         compare measured --all --allow-suspect
        metrics.txt         compare flag --metrics p95_ttft_ms,output_throughput
        arms.txt            compare flag:baseline flag:baseline --all
        directories.txt     compare ci-smoke flag --all --allow-difference '*'
        report-sides.txt    report flag:baseline ci-smoke:baseline -o ../outputs/sides/page.html
        files.txt           compare {FOREIGN}/vllm-0.json {FOREIGN}/vllm-1.json --all
        files.json          compare {FOREIGN}/vllm-0.json {FOREIGN}/vllm-1.json --json
        same-file.txt       compare {FOREIGN}/guidellm.json {FOREIGN}/guidellm.json
        exported.txt        compare exported/baseline exported/guided-top_k5 --all
        archive.txt         export flag --archive flag.tar.gz
        show-archive.txt    show flag.tar.gz
    """,
    "simulated": f"""
        simulate.json       simulate --profile ci-smoke --blocks 6 --json -o simulated
        simulate-draws.txt  simulate -p aa --blocks 2 -q -o simulated-aa
        sweep.txt           {SWEEP} --rate 4,8 --slo p50_tpot_ms=12
        sweep.json          {SWEEP} --max-concurrency 2,4 --json
        largest.txt         {SWEEP} --largest rate --slo p50_tpot_ms=13
        dry-run.txt         run topk-sweep --dry-run
        profiles.txt        profiles list
    """,
    "steptime": f"""
        fit.txt             steptime fit {TABLES} -o model.json
        fit.json            steptime fit {TABLES} --structure original --json
        evaluate.txt        steptime evaluate {TABLES}
        diagnose.json       steptime diagnose {TABLES} --json
        diagnose.txt        steptime diagnose {TABLES}
        predict.txt         {STEP} --batch 8 --prefill 512
        predict.json        {STEP} --batch 8 --context 2000 --json
        calibrate.txt       steptime calibrate model.json steptime-v1 -o carried.json
        compare-explained.txt compare flag --all --step-time-model model.json
        speculation.txt     {DRAFTED} --step-time-model model.json
        dry-run.txt         run ci-smoke --dry-run --step-time-model model.json
    """,
    "calculators": f"""
        guided.txt          steptime guided
        guided.json         steptime guided --json --scoring two-phase
        speculation.txt     {DRAFTS}
        speculation.json    {SERVED} --rate 1,2 --json
        speculation-served.txt {SERVED} --rate 1,2
        speculation-directory.txt speculation speculation
        speculation-directory.json speculation speculation --json
        flops.txt           flops --wall 100
        flops.json          flops --json --observed-candidates 3
        roofline.txt        micro roofline --show
        noise-show.txt      noise show aa
        noise-add.txt       noise add aa
        noise-list.json     noise list --json
        list.txt            list .
        list.json           list . --json
    """,
}
"""Groups of what needs no directory, or certain ones. The commands of a group run one after the other."""


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


def run_unit(unit):
    """Run the commands of (name, {file: arguments}, working directory, folder, home) in turn; return the name.

    Each unit has a home of its own, so that no other commands' noise floors and durations are on file.
    """
    name, commands, cwd, folder, home = unit
    for needed in (folder, home):
        needed.mkdir(parents=True, exist_ok=True)
    os.environ["HOME"] = str(home)
    for file, arguments in commands.items():
        out, err = folder / file, (folder / file).with_suffix(".json.err" if file.endswith(".json") else ".err")
        code = run_forked([str(each) for each in arguments], cwd, out, err)
        with err.open("a", encoding="utf-8") as stream:
            stream.write(f"exit code {code}\n")
    return name


def run_forked(arguments, cwd, out, err):
    """Exit code of ``benchctl ARGUMENTS``; negative: the signal that ended it."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            os.chdir(cwd)
            for number, source in ((0, os.devnull), (1, out), (2, err)):
                flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(source, flags, 0o644), number)
            sys.argv = ["benchctl", *arguments]
            import_module("benchctl.__main__").main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else bool(end.code))
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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
    groups = {name: parsed(lines) for name, lines in COMMANDS.items()}
    calculators = groups.pop("calculators")  # last: they read what others have written
    groups |= {name: commands_on(name) for name in names} | {"calculators": calculators}
    run_units([(name, each, work, out / "outputs" / name, out / "home" / name) for name, each in groups.items()])
    tidy(out / "outputs")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
