"""What the guidance plugin takes of each step of a vLLM server that nobody asks for guidance.

    <environment of vLLM>/bin/python -m benchmarks.guided.idle_plugin DIR [--steps N] [--repeats N]

DIR is a value model (``benchctl models make-tiny --value-model``). The processor is loaded as vLLM loads it and
called as vLLM calls it once per step, over a batch in which no row is guided; beside it, a processor that does
nothing at all. Prints nanoseconds per step, the median of the repeats, and the range.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support" / "servers" / "programs"))

from vllm_worker import worker_configuration  # noqa: E402

ROWS = 48


class Nothing:
    """The least that a processor can be."""

    def update_state(self, batch_update):
        pass

    def apply(self, logits, *_):
        return logits


def nanoseconds(processor, logits, steps):
    start_ns = time.perf_counter_ns()
    for _ in range(steps):
        processor.update_state(None)
        processor.apply(logits)
    return (time.perf_counter_ns() - start_ns) / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    os.environ["BENCHCTL_LENVM_MODEL"] = str(options.directory.resolve())
    sys.path.insert(0, str(ROOT / "benchctl" / "engines" / "inside" / "vllm"))
    import torch  # noqa: PLC0415 - of vLLM's environment
    from benchctl_lenvm import LenvmLogitsProcessor  # noqa: PLC0415 - looks at the variable above

    vocabulary = 2048
    told = worker_configuration(vocabulary=vocabulary, num_tokens=256, max_num_seqs=64, eos=2)
    guided = LenvmLogitsProcessor(told, torch.device("cpu"), False)
    logits = torch.zeros(ROWS, vocabulary)
    found = {"plugin": [], "nothing": []}
    for _ in range(options.repeats):
        found["plugin"].append(nanoseconds(guided, logits, options.steps))
        found["nothing"].append(nanoseconds(Nothing(), logits, options.steps))
    for name, values in found.items():
        print(f"{name:8} {statistics.median(values):6.0f} ns per step ({min(values):.0f} to {max(values):.0f})")


if __name__ == "__main__":
    main()
