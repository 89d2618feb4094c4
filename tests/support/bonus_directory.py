"""Result directories of ``micro bonus``, measured by workers whose passes take planted times."""

from pathlib import Path

from support.fake_passes import FakeWorkers

from benchctl.analysis.bonus import bonus_design, points_of
from benchctl.measure.directory import Origin
from benchctl.measure.measured_run import ignore
from benchctl.measure.run import Listener
from benchctl.micro.experiment import forward_profile, measure_forward

LISTENER = Listener(on_run_start=ignore, on_request_end=ignore, on_run_end=ignore, on_log_line=ignore)
BOTH = ("eager", "graph")
LAUNCHES_US = {"decode": {"eager": 870.0, "graph": 220.0}, "prefill": {"eager": 1000.0, "graph": 300.0}}
ROW_US = 5.0


def launch_bound(point, mode):
    return LAUNCHES_US[point.phase][mode] + ROW_US * point.total_new_tokens


def measure(path: Path, points, workers=None, **changes):
    """The outcome of an experiment of 6 blocks in both modes; ``changes`` are those of its settings."""
    settings = {
        "model": "llama-68m",
        "device": "cpu",
        "dtype": "float16",
        "modes": BOTH,
        "blocks": 6,
        "replays": 60,
    }
    profile = forward_profile(points, **(settings | changes))
    origin = Origin(output_root=path, argv=("benchctl", "micro", "bonus"))
    return measure_forward(profile, origin, LISTENER, (workers or FakeWorkers(launch_bound)).start)


def measured(path: Path, batch_sizes=(5, 10), modes=BOTH, contexts=(256,), **changes) -> Path:
    """The directory of a design of bonus tokens."""
    points = [point for context in contexts for point in points_of(bonus_design(batch_sizes, context, modes))]
    return measure(path, tuple(points), modes=modes, **({"name": "bonus"} | changes)).path
