"""A recorded load without its texts: arrivals and lengths as columns, for traces of a million requests."""

from array import array
from dataclasses import dataclass
from itertools import chain, islice

from benchctl.workload.datasets.prompt import lap_ns


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLoad:
    """Arrivals from the beginning of the recording, ascending, and the tokens of each prompt and output."""

    arrival_ns: "array[int]"
    prompt_tokens: "array[int]"
    output_tokens: "array[int]"

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def repeated(self, count: int) -> "RecordedLoad":
        """The first ``count`` requests of the recording, which begins again behind its last arrival."""
        num_laps = -(-count // len(self))
        period_ns = lap_ns(self.arrival_ns[0], self.arrival_ns[-1], len(self))
        arrivals = chain.from_iterable(
            (arrival + lap * period_ns for arrival in self.arrival_ns) for lap in range(num_laps)
        )
        return RecordedLoad(
            arrival_ns=array("q", islice(arrivals, count)),
            prompt_tokens=(self.prompt_tokens * num_laps)[:count],
            output_tokens=(self.output_tokens * num_laps)[:count],
        )

    def faster(self, speedup: float) -> "RecordedLoad":
        """The same requests, arriving ``speedup`` times as fast."""
        arrivals = array("q", (round(arrival / speedup) for arrival in self.arrival_ns))
        return RecordedLoad(arrivals, self.prompt_tokens, self.output_tokens)
