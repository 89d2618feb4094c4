"""Which forward passes of a value model repeat a recorded one, when rows are left out at random.

A CUDA graph repeats a pass of one size. Steps of a server that skips the rows without a choice have passes of many
sizes; each that was not recorded before costs a recording in the middle of a measurement. Here a scorer decodes on
torch's ``meta`` device, which computes nothing but knows every shape: in each step each row has a choice with some
probability, answers end and new prompts come. For each cell:

    replayed    share of the steps with a pass that scores, in which that pass repeated one recorded at the start
    recorded    passes that were recorded while decoding
    eager       share of the steps with a pass that is never recorded, beside those for new prompts
    padding     tokens computed by passes that score, over those needed, less 1

    python -m benchmarks.guided.graph_shapes [--steps 300]

``--quick`` takes a corner of each range. Neither device nor checkpoint is needed; all is drawn from one seed.
"""

import itertools
import random
import sys
from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig

from benchctl.guided.operations import PLAIN
from benchctl.guided.rows import ScoredRow
from benchctl.guided.value_model.scoring import Scorer
from benchctl.guided.value_model.value_model import random_value_model
from benchmarks.common.harness import options, show, write

VOCABULARY = 512
PROMPT, MEAN_OUTPUT, CONTEXT = 60, 150, 2048
SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7)
BATCHES = (1, 2, 5, 8, 16, 33, 64, 128, 256)
CANDIDATES = (2, 3, 4, 5)
LEAST_REPLAYED, MOST_PADDING = 0.98, 0.15


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One share of rows without a choice, batch size and number of candidates."""

    share: float
    batch: int
    candidates: int
    steps: int
    replayed: int
    recorded: int
    eager: int
    padding: float

    @property
    def holds(self) -> bool:
        is_replayed = self.replayed >= LEAST_REPLAYED * self.steps
        return is_replayed and not self.recorded and not self.eager and self.padding <= MOST_PADDING


def main() -> None:
    asked = options(__doc__, steps=300, quick=False)
    ranges = ((0.0, 0.3, 0.7), (1, 16, 64), (2, 5)) if asked.quick else (SHARES, BATCHES, CANDIDATES)
    cells = [decode(*sizes, asked.steps) for sizes in itertools.product(*ranges)]
    rows = [
        {
            "without": f"{cell.share:.0%}",
            "batch": cell.batch,
            "k": cell.candidates,
            "replayed": cell.replayed / max(cell.steps, 1),
            "recorded": cell.recorded,
            "eager": cell.eager / max(cell.steps, 1),
            "padding": cell.padding,
            "holds": "yes" if cell.holds else "NO",
        }
        for cell in cells
    ]
    show(
        rows, f"replay {LEAST_REPLAYED:.0%} or more, record and run nothing eagerly, pad {MOST_PADDING:.0%} or less"
    )
    write(asked.json, rows)
    sys.exit(not all(cell.holds for cell in cells))


def decode(
    share: float, batch: int, candidates: int, num_steps: int, *, reuse: bool = True, record: bool = True
) -> Cell:
    """Steps in which each row has no choice with probability ``share``, without a device."""
    scorer = made_scorer(batch, candidates, reuse=reuse, record=record)
    choices = torch.Generator().manual_seed(0)
    draw = random.Random(f"{share} {batch} {candidates}")
    numbers = itertools.count()
    rows = [new_row(next(numbers), draw) for _ in range(batch)]
    steps = replayed = eager = 0
    scorer.prepare(rows)
    before = scorer.counters
    for _ in range(num_steps):
        for index in range(batch):
            if draw.random() < 1 / MEAN_OUTPUT or len(rows[index].tokens) >= CONTEXT:
                scorer.forget([rows[index].key])
                rows[index] = new_row(next(numbers), draw)
                # A new prompt goes through passes of its own, which are no part of what is counted here.
                scorer.prepare([rows[index]])
        open_rows = [row for row in rows if draw.random() >= share]
        waiting = [row for row in rows if not any(row is other for other in open_rows)] if share else []
        done = scorer.counters
        ids = torch.randint(VOCABULARY, (len(open_rows), candidates), generator=choices)
        if open_rows:
            scorer.score(open_rows, ids.to("meta"), waiting)
        else:
            scorer.keep_up(waiting)
        now = scorer.counters
        num_passes = now.recordable - done.recordable
        steps += num_passes > 0
        replayed += num_passes > 0 and now.replays - done.replays == num_passes
        eager += now.forwards - done.forwards > num_passes
        # The next token of a row that was scored is one of its candidates; of any other it may be anything.
        candidates_of = dict(zip((row.key for row in open_rows), ids.tolist(), strict=True))
        for row in rows:
            row.tokens.append(draw.choice(candidates_of.get(row.key, range(VOCABULARY))))
    after = scorer.counters
    needed = after.needed_tokens - before.needed_tokens
    padded = after.padding_tokens - before.padding_tokens
    return Cell(
        share=share,
        batch=batch,
        candidates=candidates,
        steps=steps,
        replayed=replayed,
        recorded=after.recordings - before.recordings,
        eager=eager,
        padding=padded / needed if needed else 0.0,
    )


def made_scorer(batch: int, candidates: int, *, reuse: bool, record: bool) -> Scorer:
    """On a device without numbers, with the sizes of passes that a GPU with kernels has."""
    config = AutoConfig.for_model(
        "qwen2", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=VOCABULARY,
    )  # fmt: skip
    model = random_value_model(config, "meta", torch.float32)
    model.operations = replace(PLAIN, splits_keys=True)
    return Scorer(
        model, batch, CONTEXT, max_candidates=candidates, graphs=True, record=[candidates] * record, reuse=reuse
    )


def new_row(number: int, draw: random.Random) -> ScoredRow:
    return ScoredRow(number, [draw.randrange(VOCABULARY) for _ in range(PROMPT)], PROMPT, True)


if __name__ == "__main__":
    main()
