"""A library in the place of transformers: its batching loop and nothing else, for what no CPU does.

Continuous batching overlaps host and device only on a GPU. The classes here have the shape of those that the
launcher patches, alternate between two batches as they do, and learn one step late that a request has ended.
"""

from pathlib import Path
from typing import Final

_LOOP: Final = """
import collections

class Row:
    def __init__(self, state, length):
        self.state, self.query_length = state, length

class State:
    def __init__(self, prompt, limit):
        self.initial_tokens, self.generated_tokens = list(range(prompt)), []
        self.position_offset, self.limit, self.is_done = 0, limit, False

class Inputs:
    requests_in_batch = ()

class Pair:
    def __init__(self):
        self.host_io = Inputs()

class AsyncInputs:
    def __init__(self):
        self.io_pairs, self.current_pair = [Pair(), Pair()], 0

class ContinuousBatchProcessor:
    def __init__(self, is_async):
        self.use_async_batching, self.do_sample = is_async, False
        self.inputs_and_outputs = AsyncInputs() if is_async else Inputs()
        self.model_device = collections.namedtuple("Device", "type")("cuda")
        self.cb_config = collections.namedtuple("Config", "num_blocks")(7)
        self.active, self.launched = [], collections.deque()

    def prepare_next_batch(self):
        rows = []
        for state in self.active:
            length = len(state.initial_tokens) if not state.position_offset else 1
            state.position_offset += length
            rows.append(Row(state, length))
        if rows:
            io = self.inputs_and_outputs
            (io.io_pairs[io.current_pair].host_io if self.use_async_batching else io).requests_in_batch = rows
            self.launched.append(rows)
        return bool(rows)

    def _generation_step(self, model):
        if self.use_async_batching:
            self.inputs_and_outputs.current_pair = 1 - self.inputs_and_outputs.current_pair

    def update_batch(self):
        for row in self.launched.popleft():
            if row.state.is_done:
                continue
            row.state.generated_tokens.append(0)
            if len(row.state.generated_tokens) == row.state.limit:
                row.state.is_done = True
                self.active.remove(row.state)
"""
_COMMAND: Final = """
import sys
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor, State

def app(prog_name):
    print(prog_name, *sys.argv[1:])
    is_async = "async" in sys.argv
    processor = ContinuousBatchProcessor(is_async)
    for burst in ([State(5, 3), State(2, 4)], [State(3, 2)]):
        processor.active += burst
        if is_async and not processor.launched:
            processor.prepare_next_batch()
            processor._generation_step(None)
        while processor.prepare_next_batch():
            processor._generation_step(None)
            processor.update_batch()
        print("answers", *(len(state.generated_tokens) for state in burst))
"""
_FILES: Final = {
    "__init__.py": "__version__ = '0.0'",
    "cli/__init__.py": "",
    "cli/transformers.py": _COMMAND,
    "cli/serving/__init__.py": "",
    "cli/serving/utils.py": "class BaseHandler:\n    def _resolve_model(self, body): ...",
    "generation/__init__.py": "",
    "generation/configuration_utils.py": "",
    "generation/continuous_batching/__init__.py": "",
    "generation/continuous_batching/continuous_api.py": _LOOP,
}


def stub_transformers(directory: Path, **replaced: str) -> Path:
    """Write the library under ``directory``; ``replaced`` gives modules another content, by their names."""
    for name, content in _FILES.items():
        path = directory / "transformers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(replaced.get(path.stem, content))
    return directory
