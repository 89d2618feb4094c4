"""A warm server: waves of requests until two in a row take the same time per token, and shapes that come too late.

A wave is as large as the largest batch of the load, with prompts over its whole range of lengths, other first words
and short outputs. Times are those of the engine's steps where it logs them, on which no front end and no client has
any effect; elsewhere those of the client.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Literal

import msgspec

from benchctl.engines.engine import Engine, LaunchSite
from benchctl.errors import RecordError
from benchctl.load.exchange import LoadSummary
from benchctl.measure.measured_run import MeasuredRun
from benchctl.measure.warmup import MAX_TOKENS, largest_batch, spread
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.model import Profile
from benchctl.records.record import PreparedRequest, RequestRecord, WarmupRecord, WarmupWave
from benchctl.records.schema import ResultWarning, StepRecord
from benchctl.units import NS_PER_S, first_of, ms_from_ns
from benchctl.workload.opening import Burst, again, word

_MOST_WAVES: Final = 8
_LONGEST_NS: Final = 5 * NS_PER_S
"""Time of all waves after which no third or later one begins: a noisy machine never agrees with itself."""


async def send_waves(
    run: MeasuredRun,
    requests: Sequence[PreparedRequest],
    send: Callable[[Iterable[Burst], Callable[[RequestRecord], None]], Awaitable[LoadSummary]],
) -> None:
    """Send waves until two in a row agree, or to their bound, and record what it took."""
    most, tolerance_frac = most_waves(run.profile, run.engine), run.profile.workload.warmup_tolerance
    if not most or not requests:
        return
    size, waves, is_steady = largest_batch(requests, run.profile, run.settings), list[WarmupWave](), False
    begin_ns, num_steps = time.monotonic_ns(), len(steps_until_now(run))
    logs_steps = run.engine.has_steps(run.settings)
    while len(waves) < most and not is_steady:
        records, wave_ns = list[RequestRecord](), time.monotonic_ns()
        if len(waves) > 1 and wave_ns - begin_ns > _LONGEST_NS:
            break
        sent = await send([wave_requests(requests, size, len(waves) + 1)], records.append)
        run.judge_warmup(sent)
        if sent.num_failed:
            return
        steps = steps_until_now(run)
        # Those that the engine writes late belong to the wave before
        new = [each for each in steps[num_steps:] if each.clock != "host" or each.start_ns + each.dur_ns > wave_ns]
        num_steps = len(steps)
        waves.append(wave_by_steps(new) if logs_steps else wave_by_client(records))
        is_steady = len(waves) > 1 and do_agree(waves[-2], waves[-1], tolerance_frac)
    source: Literal["steps", "client"] = "steps" if logs_steps else "client"
    run.note(warmup=WarmupRecord(waves=tuple(waves), source=source, is_steady=is_steady))
    if not is_steady:
        run.warn(ResultWarning(code="warmup-unsteady", message=_unsteady(waves)))


@contextmanager
def naming_first_uses(run: MeasuredRun) -> Iterator[None]:
    """Warn of the shapes of which the server's output inside says that they were met for the first time."""
    log = LaunchSite(port=0, directory=run.directory.path).log
    num_bytes = log.stat().st_size if log.exists() else 0
    yield
    output = log.read_bytes()[num_bytes:] if log.exists() else b""
    content, _ = run.redactor.content(output)
    if uses := run.engine.first_uses(content.decode(errors="replace")):
        message = f"the server's log says during the load: {first_of(uses, 3)}; requests waited for it"
        run.warn(ResultWarning(code="shape-met-first", message=message))


def steps_until_now(run: MeasuredRun) -> list[StepRecord]:
    """The engine's steps until now, up to a line that it has not written to its end."""
    steps = list[StepRecord]()
    if run.engine.has_steps(run.settings):
        with suppress(RecordError):
            steps.extend(run.engine.read_steps(run.directory.path))
    return steps


def most_waves(profile: Profile, engine: Engine) -> int:
    """The bound on the waves that are sent until two agree; a server that others use is as warm as they made it."""
    chosen = profile.workload.max_warmup_waves
    if chosen is not None:
        return chosen
    is_ours = engine.is_launched and not is_virtual(profile.engine.kind)
    return _MOST_WAVES if is_ours and profile.workload.num_warmups else 0


def wave_requests(requests: Sequence[PreparedRequest], size: int, number: int) -> Burst:
    """A wave of ``size`` sequences; its prompts begin with words of their own."""
    by_length = sorted(requests, key=lambda request: (-request.prompt_tokens, request.index))
    wave = (
        again(request, f"warmup-wave-{number}-{i}", i, word(f"wave {number} {i}"), MAX_TOKENS)
        for i, request in enumerate(spread(by_length, size))
    )
    return tuple(msgspec.structs.replace(request, n=1, ignore_eos=True) for request in wave)


def wave_by_steps(steps: Iterable[StepRecord]) -> WarmupWave:
    """The times per token of a wave by its steps."""
    ns, tokens = Counter[bool](), Counter[bool]()
    for step in steps:
        is_decode = step.phase == "decode"
        ns[is_decode] += step.dur_ns
        tokens[is_decode] += step.num_seqs if is_decode else step.num_prefill_tokens or 0
    return WarmupWave(decode_ns=_per_token(ns[True], tokens[True]), prefill_ns=_per_token(ns[False], tokens[False]))


def wave_by_client(records: Iterable[RequestRecord]) -> WarmupWave:
    """The times per token of a wave by its answers."""
    decode_ns = decoded = prefill_ns = prompt = 0
    for record in records:
        times = record.choices[0].chunk_ns if record.choices else ()
        if times and record.sent_ns:
            decode_ns, decoded = decode_ns + times[-1] - times[0], decoded + (record.completion_tokens or 1) - 1
            prefill_ns, prompt = prefill_ns + times[0] - record.sent_ns, prompt + (record.prompt_tokens or 0)
    return WarmupWave(decode_ns=_per_token(decode_ns, decoded), prefill_ns=_per_token(prefill_ns, prompt))


def _per_token(ns: int, tokens: int) -> int | None:
    return round(ns / tokens) if tokens > 0 else None


def do_agree(one: WarmupWave, other: WarmupWave, tolerance_frac: float) -> bool:
    """True where each time that both have differs by at most this fraction of the smaller one."""
    pairs = ((one.decode_ns, other.decode_ns), (one.prefill_ns, other.prefill_ns))
    both = [(first, second) for first, second in pairs if first is not None and second is not None]
    return all(max(pair) <= min(pair) * (1 + tolerance_frac) for pair in both)


def _unsteady(waves: Sequence[WarmupWave]) -> str:
    """The message that the bound ended the warm-up."""
    last = waves[-2:]
    times = {"decoding": [wave.decode_ns for wave in last], "prompts": [wave.prefill_ns for wave in last]}
    texts = [
        f"{name} {', '.join(f'{ms_from_ns(ns):.3g}' for ns in of_waves if ns)}" for name, of_waves in times.items()
    ]
    return (
        f"{len(waves)} waves of warm-up, and the last two still differ by more than workload.warmup_tolerance; "
        f"ms per token: {'; '.join(texts)}"
    )
