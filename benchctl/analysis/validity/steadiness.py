"""Warmth and steadiness of the server that a load met, from its own records.

A stationary server raises nothing, whatever its load does by design: contexts grow while the first requests of an
empty server are all of one age, batches change, and a data set may be sorted. So the time of a step is held against
that of steps with the same batch and context (least squares), a time per token against the load that the request
met, a first-token time against the length of its prompt; only what these leave is tested. Small drifts are not
named (``MIN_DRIFT_FRAC``), and nothing is tested in loads that are too short for a steady window.

More requests than a server answers make a backlog that grows for as long as the load lasts (overload). It is told
by the number of open requests, and by no latency: a queue that is long and stays so is steady.

Shapes that are met for the first time make a server compile, capture or tune. Such a step, and the slow steps of a
server that is not warm, are found in loads of any length.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from benchctl.analysis.metrics.chunks import Chunks, chunks_of
from benchctl.analysis.metrics.latency import measured, of_load
from benchctl.analysis.metrics.steady import Window, request_times, steady_window
from benchctl.analysis.statistics.trend import trend_of
from benchctl.profile.arrival import Arrival
from benchctl.records.columns import Flags, Floats, Integers, StepColumns
from benchctl.records.loaded import LoadedRun
from benchctl.records.schema import ResultWarning
from benchctl.units import NS_PER_S, count_of, first_of, ms_from_ns, percentage

MIN_DRIFT_FRAC: Final = {"decode_step_ms": 0.0075, "tpot_ms": 0.0075, "ttft_ms": 0.2}
"""The least drift over a window that is named. The mean moves by half of it, with 0.75 % by well below the change
of 1 % that a comparison calls by default; and of a drift of 3 % over a load, half of which the window may lack,
enough is left. First-token times depend on the queue, whose chance alone moves them by a tenth and more."""
_LEVEL: Final = 0.01
"""Of each drift test: with two of them, 98 of 100 steady loads raise nothing."""
_MIN_IN_BATCH, _NUM_BATCHES = 4, 25
"""Means whose trend is tested: enough for the normal limit of the test (10), and each over enough values to leave
little of their autocorrelation."""
_MIN_BACKLOG_FRAC: Final = 0.02
"""Of the requests that were sent, the least number by which open ones grow that is named ..."""
_CHANCE, _CHANCE_WITHOUT_WINDOW = 2.0, 3.0
"""... and in square roots of that number: the scatter between arrivals and answers at random times is 1.4 of these.
Without a window the beginning, in which a server fills, may be in the second half as well."""
_MIN_STEPS: Final = 20
"""Fewest steps of a kind that tell what a step of it takes."""
_MIN_PROMPTS, _MOST_PROMPTS = 5, 100
"""Fewest steps with prompts that tell what such a step takes at most, in proportion to the tokens of one with
fewer, and the number of the largest that are asked."""
_OUTLIER: Final = 3.0
"""Times the expected duration, or the 99th percentile of steps whose shape is known: compiling and capturing take
tens of steps, a busy core rarely doubles one."""
_SLOW, _MIN_SLOW = 1.2, 3
"""Times the expected duration from which steps at the beginning of a load are slow, beyond errors of what is
expected; three in a row, each of which is beyond the 99th percentile of later steps as well."""
_MOST_NAMED: Final = 12
_FEATURES: Final = ("context_tokens", "num_decode_tokens", "guided_rows", "candidates", "value_extend_tokens")


class _Steps(NamedTuple):
    """The steps of a load beside what steps of their batch and context take."""

    dur_ns: Floats
    ratio: Floats
    """Duration over that of such steps; NaN where nothing says what they take."""
    is_decode: Flags
    is_first: Flags
    """The first of the server's steps with its shape: its number of sequences, and the power of two that its prompt
    tokens reach."""


def steadiness_warnings(run: LoadedRun, arrival: Arrival | None) -> tuple[ResultWarning, ...]:
    """Warnings about a server that was not warm or steady under a load of a run; they leave the run as it is."""
    before, warnings = list[StepColumns](), list[ResultWarning]()
    for load in run.loads:
        before.append(load.warmup_columns)
        number = "" if load.load is None else f"load {load.load}: "
        warnings += [
            ResultWarning(code=code, message=f"{number}{text}", where=run.record.run_id)
            for code, text in _observed(load, before, arrival)
        ]
        before.append(load.columns)
    return tuple(warnings)


def _observed(run: LoadedRun, before: Sequence[StepColumns], arrival: Arrival | None) -> Iterator[tuple[str, str]]:
    """Code and message of each warning about one load of a server that had the steps ``before``."""
    chunks, steps = chunks_of(measured(run.requests)), _steps_of(run, before)
    if steps is not None:
        num_slow = _num_slow(steps)
        if num_slow:
            yield "not-steady", _slow_text(run, steps, num_slow)
        if text := _first_shapes(run, steps, num_slow):
            yield "shape-met-first", text
    window = steady_window(chunks)
    backlog = None if arrival is None or arrival.rate is None else _backlog_text(run, window)
    if backlog is not None:
        yield "backlog-grows", backlog
    for text in _drifts(run, chunks, window, steps, arrival) if window else ():
        if backlog is None or not text.startswith("ttft_ms"):
            yield "not-steady", text


def backlog_growth(sent_ns: Integers, ended_ns: Integers, begin_ns: int | None) -> float | None:
    """Requests by which those that are open grow in number between ``begin_ns`` and the last send, or in the
    second half of the sends without it.

    None where chance explains it, where it is less than 2 % of the requests sent, and with fewer than 100 of them.
    """
    sends_ns = np.sort(sent_ns)
    first = len(sends_ns) // 2 if begin_ns is None else int(np.searchsorted(sends_ns, begin_ns))
    num_sent = len(sends_ns) - first
    if num_sent < _MIN_IN_BATCH * _NUM_BATCHES:
        return None
    num_ended = np.searchsorted(np.sort(ended_ns), sends_ns[first:], side="right")
    num_open = np.arange(first + 1, len(sends_ns) + 1) - num_ended
    growth = trend_of(np.array([batch.mean() for batch in np.array_split(num_open, _NUM_BATCHES)])).change
    chance = _CHANCE_WITHOUT_WINDOW if begin_ns is None else _CHANCE
    return growth if growth >= max(_MIN_BACKLOG_FRAC * num_sent, chance * math.sqrt(num_sent)) else None


def _backlog_text(run: LoadedRun, window: Window | None) -> str | None:
    """The backlog that grows under a load with a rate, from the times at which its requests were due."""
    requests = [request for request in of_load(run) if request.done_ns is not None or request.error is None]
    due_ns = np.array([request.scheduled_ns for request in requests], np.int64)
    ended_ns = np.array([request.done_ns for request in requests if request.done_ns is not None], np.int64)
    growth = backlog_growth(due_ns, ended_ns, None if window is None else window.begin_ns)
    if growth is None:
        return None
    return (
        f"the server answers fewer requests than arrive: {growth:.0f} more of them were open at the end of the "
        f"load than {'in its middle' if window is None else 'when its steady window began'}, so its "
        "latencies are those of a load of this length alone; lower workload.arrival.request_rate"
    )


def _fitted(values: Floats, features: Sequence[Floats], is_used: Flags) -> Floats:
    """Least squares of the used values on the features and a constant, for all of them."""
    scaled = [each / max(float(np.abs(each).max(initial=0)), 1.0) for each in features]
    matrix = np.column_stack([np.ones(len(values)), *scaled])
    return np.asarray(matrix @ np.linalg.lstsq(matrix[is_used], values[is_used], rcond=None)[0])


def _features(steps: StepColumns) -> list[Floats]:
    """The work of each step; the square root lets the time of a sequence fall with their number."""
    counts = [values for values in map(steps.optional, _FEATURES) if values is not None]
    return [steps.num_seqs.astype(float), np.sqrt(steps.num_seqs), *map(np.nan_to_num, counts)]


def _steps_of(run: LoadedRun, before: Sequence[StepColumns]) -> _Steps | None:
    """The steps of a load; None where too few decode with a shape that was met before, or durations are unknown."""
    steps, tokens = run.columns, _prompt_tokens(run.columns)
    shapes, firsts = np.unique(_shapes(steps), return_index=True)
    is_new = ~np.isin(shapes, np.concatenate([_shapes(each) for each in before]))
    is_first = np.isin(np.arange(len(steps)), firsts[is_new])
    is_decode = steps.in_phase("decode") if len(steps) else is_first
    is_plain = is_decode & ~is_first
    if not run.record.times_whole_steps or is_plain.sum() < _MIN_STEPS:
        return None
    loading_ns = steps.section_ns.get("value_model_load", 0)  # has a finding of its own
    dur_ns = (steps.dur_ns - loading_ns).astype(float)
    typical_ns = float(np.median(dur_ns[is_plain]))
    expected_ns = np.full(len(dur_ns), typical_ns)
    for limit in (_OUTLIER, 1.5):
        is_used = is_plain & (dur_ns <= limit * expected_ns)
        expected_ns = np.maximum(_fitted(dur_ns, _features(steps), is_used), typical_ns / 10)
    at = np.flatnonzero(~is_decode & (tokens > 0))
    if len(at) >= _MIN_PROMPTS:
        like = at[np.argsort(tokens[at], kind="stable")][-_MOST_PROMPTS:]
        bounds_ns = dur_ns[like] * np.maximum(1, tokens[at, None] / tokens[like])
        bounds_ns[at[:, None] == like] = np.inf
        expected_ns[at] = np.maximum(expected_ns[at], bounds_ns.min(axis=1))
    is_known = is_decode | ((tokens > 0) & (len(at) >= _MIN_PROMPTS))
    return _Steps(dur_ns, np.where(is_known, dur_ns / expected_ns, np.nan), is_decode, is_first)


def _prompt_tokens(steps: StepColumns) -> Floats:
    tokens = steps.optional("num_prefill_tokens")
    return np.zeros(len(steps)) if tokens is None else np.nan_to_num(tokens)


def _shapes(steps: StepColumns) -> Floats:
    """A number for the shape of each step."""
    return np.asarray(steps.num_seqs * 64.0 + np.ceil(np.log2(_prompt_tokens(steps) + 1)))


def _num_slow(steps: _Steps) -> int:
    """Steps at the beginning of a load up to the last of at least three slow decode steps in a row; else 0."""
    decodes = np.flatnonzero(steps.is_decode)
    ratios = steps.ratio[decodes]
    is_slow = ratios > max(_SLOW, float(np.quantile(ratios[len(ratios) // 2 :], 0.99)))
    num_slow = int(np.append(is_slow, False).argmin())
    return int(decodes[num_slow - 1]) + 1 if num_slow >= _MIN_SLOW else 0


def _slow_text(run: LoadedRun, steps: _Steps, num_slow: int) -> str:
    start_ns, end_ns = run.columns.start_ns[0], run.columns.start_ns[num_slow - 1] + steps.dur_ns[num_slow - 1]
    return (
        f"decode_step_ms: the first {num_slow} steps, up to {(end_ns - start_ns) / NS_PER_S:.3g} s into the load, "
        f"took {np.nanmedian(steps.ratio[:num_slow]):.2g} times what later ones of their batch take: the server "
        "was not warm; raise num_warmups"
    )


def _first_shapes(run: LoadedRun, steps: _Steps, num_slow: int) -> str | None:
    """The steps behind the slow ones that met a shape first and took far longer than expected."""
    usual = steps.ratio[~steps.is_first & ~np.isnan(steps.ratio)]
    limit = _OUTLIER * max(1.0, float(np.quantile(usual, 0.99))) if len(usual) else _OUTLIER
    at = num_slow + np.flatnonzero(steps.is_first[num_slow:] & (steps.ratio[num_slow:] > limit))
    if not len(at):
        return None
    columns, longest = run.columns, int(at[steps.dur_ns[at].argmax()])
    sizes = first_of([str(size) for size in columns.num_seqs[at].tolist()], _MOST_NAMED)
    share = float((steps.dur_ns - steps.dur_ns / steps.ratio)[at].sum() / steps.dur_ns.sum())
    return (
        f"{count_of(len(at), 'step')} met a shape first inside the load, with batches of {sizes} sequences, and "
        f"{percentage(share, 2)} of the time of all steps went into it; the longest, with "
        f"{count_of(int(columns.num_seqs[longest]), 'sequence')}, took {ms_from_ns(steps.dur_ns[longest]):.4g} ms, "
        f"{steps.ratio[longest]:.2g} times as long as expected, "
        f"{(columns.start_ns[longest] - columns.start_ns[0]) / NS_PER_S:.3g} s into the load; let the warm-up have "
        "these shapes (workload.warmup_shapes)"
    )


def _drifts(
    run: LoadedRun, chunks: Chunks, window: Window, steps: _Steps | None, arrival: Arrival | None
) -> Iterator[str]:
    """Each drift of a window that is beyond chance and large enough to matter."""
    for name, ratios in _series(run, chunks, window, steps, arrival):
        if len(ratios) < _MIN_IN_BATCH * _NUM_BATCHES:
            continue
        average = np.median if name == "ttft_ms" else np.mean
        trend = trend_of(np.array([average(batch) for batch in np.array_split(ratios, _NUM_BATCHES)]))
        if trend.p_value < _LEVEL and abs(trend.change) >= MIN_DRIFT_FRAC[name]:
            way, factor = "rises" if trend.change > 0 else "falls", run.record.clock_factor / NS_PER_S
            begin_s, end_s = ((t_ns - window.start_ns) * factor for t_ns in (window.begin_ns, window.end_ns))
            yield (
                f"{name} {way} by {percentage(abs(trend.change), 2)} over the steady window, requests "
                f"{window.first + 1} to {window.end} of {window.num_sent} ({begin_s:.3g} to {end_s:.3g} s into the "
                f"load), beyond what batches and lengths explain"
            )


def _series(
    run: LoadedRun, chunks: Chunks, window: Window, steps: _Steps | None, arrival: Arrival | None
) -> Iterator[tuple[str, Floats]]:
    """The series of a window to be tested, in order of time, each as a multiple of what its load explains."""
    ttft_ns, tpot_ns = request_times(chunks)
    sent_ns, done_ns = chunks.sent_ns, np.array([request.done_ns or 0 for request in chunks.requests])
    prompt = np.array([float(request.prompt_tokens or 0) for request in chunks.requests])
    if steps is not None:
        is_used = window.steps(run) & steps.is_decode & (steps.ratio < 1.5)
        yield "decode_step_ms", _ratios(steps.dur_ns, _features(run.columns), np.flatnonzero(is_used))
    else:
        output = np.array([float(request.completion_tokens or 0) for request in chunks.requests])
        before, after = (np.searchsorted(np.sort(each), (sent_ns + done_ns) / 2) for each in (sent_ns, done_ns))
        yield "tpot_ms", _ratios(tpot_ns, [prompt, output, (before - after).astype(float)], window.requests)
    if arrival is None or arrival.kind != "trace":  # whose rate changes, and with it the queue
        yield "ttft_ms", _ratios(ttft_ns, [prompt], window.requests)


def _ratios(values: Floats, features: Sequence[Floats], at: Integers) -> Floats:
    """The known values at these positions over those that the features explain there."""
    is_used = np.isin(np.arange(len(values)), at) & ~np.isnan(values)
    at = at[is_used[at]]
    if not len(at):
        return values[at]
    return values[at] / np.maximum(_fitted(values, features, is_used)[at], np.median(values[at]) / 10)
