"""Kill each process of a real server, by each signal, at each moment of a run; print one line for each as a table.

Usage: python -m benchmarks.measure.kill_matrix ENGINE_PRESET MODEL_DIRECTORY [MOMENT...]
"""

import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.servers.killing import FRONT_END, MOMENTS, Blow, Outcome, strike

PROCESSES = {"vllm-cpu": (FRONT_END, "VLLM::EngineCore", "VLLM::Worker")}


def main() -> None:
    engine, model, *moments = sys.argv[1:]
    print("| killed | signal | at | run | cause | exit | told after | left over | message |")
    print("|---|---|---|---|---|---|---|---|---|")
    for moment in moments or MOMENTS:
        for who in PROCESSES.get(engine, (FRONT_END,)):
            for number in (signal.SIGTERM, signal.SIGKILL):
                blow = Blow(engine=engine, who=who, number=number, moment=moment)
                with tempfile.TemporaryDirectory(prefix="kill-matrix-", ignore_cleanup_errors=True) as directory:
                    print(row(blow, strike(blow, Path(model), Path(directory))), flush=True)
    command = " ".join(["scripts/kill_matrix", *sys.argv[1:]])
    print(f"\n{engine}, {time.strftime('%Y-%m-%d', time.gmtime())}, `{command}`")


def row(blow: Blow, outcome: Outcome) -> str:
    message = outcome.message.partition("; ")[0]
    cells = [blow.who, blow.number.name, blow.moment, outcome.state, outcome.cause, str(outcome.exit_code)]
    cells += [f"{outcome.told_s:.1f} s", ", ".join(outcome.leftovers) or "nothing", message.replace("|", "/")]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
