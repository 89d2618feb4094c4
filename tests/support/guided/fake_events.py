"""Marks in the work of a device that is not there, which reaches them when a test says so."""

from itertools import count


class Event:
    """Each is a millisecond after the one that was recorded before it; ``synchronize`` has the device reach it."""

    reached = 0
    _numbers = count(1)

    def record(self):
        self.number = next(self._numbers)

    def query(self):
        return self.number <= type(self).reached

    def synchronize(self):
        type(self).reached = max(type(self).reached, self.number)

    def elapsed_time(self, end):
        assert self.query()
        assert end.query(), "the time until a mark that the device has not reached is not known"
        return float(end.number - self.number)


def device():
    """A device of its own: a class of events that has reached none yet."""
    return type("DeviceEvent", (Event,), {"reached": 0, "_numbers": count(1)})
