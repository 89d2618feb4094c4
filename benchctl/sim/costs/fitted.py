"""Step time of a fitted model, see ``benchctl/steptime/model.py``: coefficients times features of the step's work.

The option ``step_time_model`` names its file. With noise ``fitted`` each server life takes one bootstrap draw of
the coefficients, chosen by its noise seed: lives then differ as much as another set of measured runs would move the
prediction.

A stretch of decode steps needs no call of the model, whatever its structure. Along a growing context the prediction
is linear between bends, where one term overtakes another. Contexts are divided into spans of 1,024 tokens for each
row; in a span without a bend the prediction is the line through its ends, and a span with one is halved until the
context at hand lies on a straight piece. The pieces depend on the model and the rows alone, so that a step costs
the same wherever its stretch began.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, DecodeCost, StepBatch, StepCost, served_models
from benchctl.steptime.model import read_model
from benchctl.steptime.work import Deployment, StepWork
from benchctl.units import NS_PER_US

_NOTHING: Final = StepCost(model_forward=0)


def cost_model(config: SimConfig) -> CostModel:
    """The cost model of the configured file. Raises UsageError when file, model or device do not fit together."""
    model = read_model(Path(config.step_time_model or "").expanduser())
    if config.noise == "fitted":
        model = model.with_draw(config.noise_seed)
    shape, value_shape, hardware = served_models(config)
    deployment = Deployment(
        shape=shape, hardware=hardware, tensor_parallel=config.tensor_parallel_size, value_shape=value_shape
    )
    model.check_deployment(deployment)

    def price_us(work: StepWork) -> float:
        return float(model.extrapolate_us(work, deployment))

    def step(batch: StepBatch) -> StepCost:
        return StepCost(model_forward=round(price_us(work_of(batch)) * NS_PER_US))

    def decode(batch: StepBatch) -> DecodeCost:
        rows = batch.num_decode_tokens
        return straight_piece(
            lambda context: price_us(decode_work(rows, context)) * NS_PER_US, rows, batch.context_tokens
        )

    return CostModel(step=step, decode=decode)


def work_of(batch: StepBatch) -> StepWork:
    """The work of any step. A row's newest token is not in the cache before the step."""
    rows, tokens = batch.num_decodes, batch.num_prefill_tokens
    verified, guided = batch.num_decode_tokens, batch.guided
    return StepWork(
        num_prefills=float(batch.num_seqs - rows),
        prefill_tokens=float(tokens),
        prefill_context=float(batch.context_tokens - batch.decode_context - tokens),
        prefill_positions=batch.attended_positions - batch.decode_positions - tokens / 2,
        num_decodes=float(rows),
        decode_tokens=float(verified),
        decode_context=float(batch.decode_context - verified),
        decode_positions=batch.decode_positions - verified / 2,
        num_sampled=float(batch.num_sampling),
        guided_rows=float(guided.scored_rows),
        candidates=float(guided.candidates),
        value_prefill_tokens=float(guided.value_prefill_tokens),
        value_extend_tokens=float(guided.value_extend_tokens),
    )


def decode_work(rows: int, context: float) -> StepWork:
    """The work of decoding rows alone whose contexts add up to ``context`` after the step."""
    return StepWork(
        num_decodes=float(rows),
        decode_tokens=float(rows),
        decode_context=float(context - rows),
        decode_positions=context - rows / 2,
        num_sampled=float(rows),
    )


def straight_piece(price_ns: Callable[[float], float], rows: int, context: int) -> DecodeCost:
    """The line of a price over the sum of contexts, on the straight piece that ``context`` lies on."""
    span = (1 << 10) * rows
    since = context // span * span
    while span > 1:
        start_ns, end_ns = price_ns(since), price_ns(since + span)
        if _is_straight(price_ns, since, span, start_ns, end_ns):
            slope = (end_ns - start_ns) / span
            lines = ((start_ns - slope * since, slope),)
            return DecodeCost(rest=_NOTHING, lines=lines, since=since, until=since + span)
        half = span // 2
        since, span = (since, half) if context < since + half else (since + half, span - half)
    return DecodeCost(rest=_NOTHING, lines=((price_ns(since), 0.0),), since=since, until=since + 1)


def _is_straight(price_ns: Callable[[float], float], since: int, span: int, start_ns: float, end_ns: float) -> bool:
    # Deviation from a straight line that counts as a bend, as a share of the time
    bend_ns = 1e-9 * max(start_ns, end_ns)
    return all(
        abs(price_ns(since + share * span) - start_ns - share * (end_ns - start_ns)) <= bend_ns
        for share in (0.25, 0.5, 0.75)
    )
