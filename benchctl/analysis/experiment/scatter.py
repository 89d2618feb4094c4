"""Scatter and costs of a measured experiment, the grounds of a cheaper design."""

import math
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import baseline_pairs, deciding_among
from benchctl.analysis.statistics.components import Components, Costs, variance_components
from benchctl.units import s_from_ns


def scatter_by_metric(experiment: Experiment, names: Iterable[str] | None = None) -> dict[str, Components]:
    """The variance components of those of these metrics that several loads per server tell, over all arms.

    From the loads that count of the runs that count; by default of the metrics that decide, or would with another
    arm. Empty for an experiment of one load per server.
    """
    if all(len(run.loads) == 1 for run in experiment.counted_runs.values()):
        return {}
    if names is None:
        names = deciding_among(experiment, baseline_pairs(experiment))
    loads = {
        key: list(zip((load.load or 1 for load in run.loads), experiment.load_metrics(run), strict=True))
        for key, run in experiment.counted_runs.items()
    }
    scatter = {}
    for name in names:
        servers = {
            key: {number: math.log(value) for number, each in of_run if (value := each.get(name)) and value > 0}
            for key, of_run in loads.items()
        }
        if (components := variance_components(servers)) is not None:
            scatter[name] = components
    return scatter


def costs_of(experiment: Experiment) -> Costs | None:
    """The recorded seconds of one server: medians over the runs that count; None where none was launched.

    A start is all but the loads: from the launch to the first request, with the warm-up, and from the last token to
    the launch of the next server of the block, while one is stopped and its records are read.
    """
    runs = sorted((run.record for run in experiment.counted_runs.values()), key=lambda record: record.index)
    spans = [
        (record, launch_ns, times.first_send_ns, times.last_token_ns)
        for record in runs
        if (launch_ns := (times := record.times).launch_ns) is not None
    ]
    starts_ns = [first_ns - launch_ns for _, launch_ns, first_ns, _ in spans if first_ns is not None]
    loads_ns = [
        (last_ns - first_ns) / max(1, sum(load.first_send_ns is not None for load in record.loads))
        for record, _, first_ns, last_ns in spans
        if first_ns is not None and last_ns is not None
    ]
    ends_ns = [
        later_ns - last_ns
        for (record, _, _, last_ns), (later, later_ns, _, _) in pairwise(spans)
        if last_ns is not None and record.block == later.block
    ]
    if not loads_ns:
        return None
    return Costs(s_from_ns(median(starts_ns) + median(ends_ns or [0])), s_from_ns(median(loads_ns)))
