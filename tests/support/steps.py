"""The steps of a loaded run as records again, for tests that look at single steps or alter them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from benchctl.records.columns.columns import CLOCKS, OPTIONAL, PHASES, StepColumns, columns_from
from benchctl.records.loaded import LoadedRun
from benchctl.records.schema import StepRecord

_FLAGS = {"is_greedy", "fused", "value_replayed"}


def records_of(run: LoadedRun) -> tuple[StepRecord, ...]:
    """The steps of the warm-up, then those of the load, numbered anew."""
    return (*_records(run.warmup_columns, is_warmup=True), *_records(run.columns, is_warmup=False))


def with_steps(run: LoadedRun, records: Iterable[StepRecord]) -> LoadedRun:
    """The run with other steps."""
    steps = tuple(records)
    return replace(run, columns=columns_from(steps), warmup_columns=columns_from(steps, is_warmup=True))


def _records(columns: StepColumns, *, is_warmup: bool) -> Iterator[StepRecord]:
    section_ns, has_section, accepted = columns.section_ns, columns.has_section, columns.accepted_by_position
    optionals = {name: values for name in OPTIONAL if (values := columns.optional(name)) is not None}
    for i in range(len(columns)):
        fields = {name: int(values[i]) for name, values in optionals.items() if not np.isnan(values[i])}
        yield StepRecord(
            step=i,
            start_ns=int(columns.start_ns[i]),
            dur_ns=int(columns.dur_ns[i]),
            num_seqs=int(columns.num_seqs[i]),
            clock=CLOCKS[columns.arrays["clock"][i]],
            phase=PHASES[columns.arrays["phase"][i]],
            is_warmup=is_warmup,
            sections_ns={name: int(values[i]) for name, values in section_ns.items() if has_section[name][i]},
            accepted_by_position=(
                None if accepted is None or np.isnan(accepted[i, 0]) else tuple(int(n) for n in accepted[i])
            ),
            **{name: bool(value) if name in _FLAGS else value for name, value in fields.items()},
        )
