"""Result directories for a store of outputs: each bundled profile, simulated or measured small, and some others."""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.results import lenvm_results, planted
from support.servers.real_engines import tiny_model

CHECKOUT = Path(__file__).parents[2]
BLOCKS = 6
SMALL = ("--set", "workload.num_prompts=8")
# Of each profile: the words that make it small enough and fit for the simulator.
PROFILES = {
    **dict.fromkeys(("ci-smoke", "rate-limited"), ("--engine", "sim")),
    **dict.fromkeys(("aa", "controls", "flag", "guided-idle", "model-size-sweep"), ("--engine", "sim", *SMALL)),
    **dict.fromkeys(("natural", "own-prompts", "structured-output", "topk-sweep"), ("--engine", "sim", *SMALL)),
    **dict.fromkeys(("two-builds", "lenvm-model-sizes", "llm-mock-batch"), ("--engine", "sim", *SMALL)),
    "speculation": ("--engine", "sim", *SMALL),
    "lenvm-50x16": ("--engine", "sim", "--set", "workload.num_prompts=4", "--set", "workload.samples_per_prompt=4"),
    "bonus-tokens": (*SMALL, "--set", "workload.output_len=64"),
    "llm-mock-batch": SMALL,
    "azure-replay": ("--set", "workload.path={inputs}/azure.csv", "--set", "workload.num_prompts=12"),
    **dict.fromkeys(("steptime-v1", "steptime-w1", "steptime-w2"), ("--engine", "sim", *SMALL)),
    **dict.fromkeys(("steptime-w3", "steptime-w4"), ("--engine", "sim", *SMALL)),
}
SKIPPED = {
    "llm-mock-cache": "needs files that the commands of docs/tasks/llm-mock.md make",
    "rtx4090-replay": "needs a data set and measured layers",
    "steptime-w5": "the simulator's cost models price one device",
    **dict.fromkeys(("fused-vs-two-phase", "guided-switches", "noop-skip"), "needs the engine vllm-lenvm"),
    "lora": "needs vLLM",
}
DAMAGED = {"unfinished": "ci-smoke", "damaged": "ci-smoke"}


def units(out, engines):
    """Commands that make OUT/directories, to be run in it. Profiles that are left out are printed with a reason."""
    names = {path.stem for path in (CHECKOUT / "profiles").glob("*.yaml")}
    for name in sorted(names - PROFILES.keys()):
        print(f"  {name} is left out: {SKIPPED.get(name, 'no words for it in benchmarks/outputs/directories.py')}")
    inputs = out / "inputs"
    write_inputs(inputs)
    shutil.copytree(CHECKOUT / "results/example", out / "directories/example")
    planted.write_on_nodes(out / "directories/nodes", ["a", "b", "c", "d", "a", "b", "c", "d"], {"c": 0.03})
    few = ("--blocks", str(BLOCKS), "--quiet")
    commands = {
        "measured": ["run", "ci-smoke", *few, "--no-store-noise"],
        "measured-flag": ["run", "flag", "--engine", "sim", *SMALL, "--blocks", "2", "--quiet"],
        **{
            name: ["simulate", "--profile", name, *(word.format(inputs=inputs) for word in words), *few]
            for name, words in PROFILES.items()
            if name in names
        },
        "lenvm": ["import", "lenvm", inputs / "gsm8k_qwen2.5-7b_qwen2.5-1.5b"],
    }
    if engines is not None:
        model = tiny_model(inputs)
        tiny = ("--set", f"model={model}", "--set", "workload.output_len=24", "--set", "workload.num_prompts=2")
        commands["vllm"] = ["run", "ci-smoke", "--engine", "vllm-cpu", *tiny, "--blocks", "2", "--quiet"]
        cache = out / "home/made/vllm/.cache/benchctl"
        cache.mkdir(parents=True)
        (cache / "engines").symlink_to(engines)
    return [
        (name, {f"{name}.txt": [*words, "-o", name]}, out / "directories", out / "made", out / "home/made" / name)
        for name, words in commands.items()
    ]


def write_inputs(inputs):
    inputs.mkdir()
    lenvm_results.write_directory(inputs / "gsm8k_qwen2.5-7b_qwen2.5-1.5b")
    rows = [f"2023-11-16 18:15:{46 + i}.{100 + i}0000,{200 + 37 * i},{20 + 5 * i}" for i in range(13)]
    (inputs / "azure.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")


def change_copies(kept):
    """Copies of a directory: one whose last runs never ended, and one with a damaged and an altered file."""
    for name, source in DAMAGED.items():
        shutil.copytree(kept / source, kept / name, symlinks=True)
    for run in sorted((kept / "unfinished/runs").iterdir())[-3:]:
        shutil.rmtree(run)
    first, second = sorted((kept / "damaged/runs").iterdir())[:2]
    document = json.loads((first / "run.json").read_text(encoding="utf-8"))
    (first / "run.json").write_text(json.dumps(document)[:200], encoding="utf-8")
    (log,) = second.glob("requests.jsonl")
    log.write_bytes(log.read_bytes().replace(b'"done"', b'"Done"', 1) + b"{")
