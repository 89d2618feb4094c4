"""A torch that notes the calls of its CUDA part, in order; it has neither tensors nor a device."""

import contextlib
import types


class FakeTorch(types.ModuleType):
    """``calls`` are in order; ``fails`` are the calls that raise RuntimeError with the given text."""

    __version__ = "2.99.0+fake"

    def __init__(self, *, num_devices=1, fails=None):
        super().__init__("torch")
        self.calls, self.fails = [], fails or {}
        self.current = "ordinary"
        self.device = lambda kind, index=None: kind if index is None else f"{kind}:{index}"
        self.backends = types.SimpleNamespace(cpu=types.SimpleNamespace(get_cpu_capability=lambda: "FAKE"))
        self.version = types.SimpleNamespace(cuda="99.0")
        self.cuda = types.SimpleNamespace(
            is_available=lambda: num_devices > 0,
            device_count=lambda: num_devices,
            set_device=lambda device: self.note(f"set device {device}"),
            synchronize=lambda: self.note("synchronize"),
            empty_cache=lambda: self.note("empty cache"),
            current_stream=lambda: FakeStream(self, self.current),
            stream=self.stream,
            Stream=lambda: FakeStream(self, "side"),
            Event=lambda **options: FakeEvent(self, **options),
            CUDAGraph=lambda: FakeGraph(self),
            memory_stats=lambda: {"num_device_alloc": 4},
            mem_get_info=lambda: (1_000, 9_000),
            get_device_properties=lambda _: types.SimpleNamespace(
                name="Fake 100", total_memory=9_000, major=9, minor=0, multi_processor_count=132, uuid="0-1-2"
            ),
        )

    def note(self, call):
        self.calls.append(f"{call} on {self.current}" if self.current != "ordinary" else call)
        if call in self.fails:
            raise RuntimeError(self.fails[call])

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before


class FakeStream:
    def __init__(self, torch, name):
        self.torch, self.name = torch, name

    def wait_stream(self, other):
        self.torch.note(f"{self.name} waits for {other.name}")


class FakeEvent:
    def __init__(self, torch, *, enable_timing):
        assert enable_timing
        self.torch, self.ms = torch, 0.0

    def record(self):
        self.torch.note("record")
        self.ms += 1.5

    def elapsed_time(self, end):
        return end.ms - self.ms


class FakeGraph:
    def __init__(self, torch):
        self.torch = torch

    def capture_begin(self):
        self.torch.note("capture begins")

    def capture_end(self):
        self.torch.note("capture ends")

    def replay(self):
        self.torch.note("launch")
