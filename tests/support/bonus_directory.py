"""Result directories of ``micro bonus``, measured by workers whose passes take planted times."""

from pathlib import Path

from support.fake_passes import FakeWorkers

from benchctl.analysis.bonus import bonus_design, points_of
from benchctl.measure.directory import Origin
from benchctl.measure.experiment import Listener
from benchctl.measure.measured_run import ignore
from benchctl.micro.experiment import measure_forward
from benchctl.micro.points import forward_profile

LISTENER = Listener(on_run_start=ignore, on_request_end=ignore, on_run_end=ignore, on_log_line=ignore)
BOTH = ("eager", "graph")
LAUNCHES_US = {"decode": {"eager": 870.0, "graph": 220.0}, "prefill": {"eager": 1000.0, "graph": 300.0}}
ROW_US = 5.0


def launch_bound(point, mode):
    return LAUNCHES_US[point.phase][mode] + ROW_US * point.total_new_tokens


def measured(
    path: Path, batch_sizes=(5, 10), modes=BOTH, contexts=(256,), workers=None, name="bonus", **changes
) -> Path:
    """The directory of an experiment of 6 blocks; ``changes`` are those of its settings."""
    designs = [bonus_design(batch_sizes, context, modes) for context in contexts]
    points = tuple(point for design in designs for point in points_of(design))
    values = {"model": "llama-68m", "device": "cpu", "dtype": "float16", "modes": modes, "blocks": 6, "replays": 60}
    profile = forward_profile(points, name=name, **(values | changes))
    origin = Origin(output_root=path, argv=("benchctl", "micro", "bonus"))
    return measure_forward(profile, origin, LISTENER, (workers or FakeWorkers(launch_bound)).start).path
