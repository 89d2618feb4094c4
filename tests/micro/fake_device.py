"""A device that is not there: it notes what is asked of it, in order, and its clock advances when work is done."""

import itertools

WORK_NS = 1_000


class FakeMark:
    def __init__(self, device, name):
        self.device, self.name, self.ns = device, name, 0

    def record(self):
        self.device.calls.append(f"record {self.name}")
        self.ns = self.device.now_ns


class FakeDevice:
    """``calls`` are the questions; ``fails_to_capture`` is raised by captures."""

    clock = "device"

    def __init__(self, *, fails_to_capture=None, allocations=()):
        self.calls, self.now_ns = [], 0
        self.fails_to_capture = fails_to_capture
        self._allocations = itertools.chain(allocations, itertools.repeat(0))

    def work(self, name="work"):
        def run():
            self.calls.append(name)
            self.now_ns += WORK_NS

        return run

    def synchronize(self):
        self.calls.append("synchronize")

    def marks(self, count):
        names = ["anchor", *(f"{end} {i}" for i in range(count // 2) for end in ("start", "end"))]
        return [FakeMark(self, name) for name in names]

    def elapsed_ns(self, start, end):
        self.calls.append(f"elapsed {start.name} {end.name}")
        return end.ns - start.ns

    def capture(self, work, warmups):
        self.calls.append(f"capture after {warmups}")
        work()
        self.calls.append("capture ends")
        if self.fails_to_capture is not None:
            raise self.fails_to_capture
        return self.work("launch")

    def num_allocations(self):
        return next(self._allocations)
