"""One choice of an answer while it is read, and the choices of one answer."""

from array import array
from typing import Final

from benchctl.load.answer.excess import ExcessError

UNCOUNTED: Final = -1
_CHAR_BYTES: Final = 6
_CHUNK_BYTES: Final = 64
"""The most that a character, and the numbers of a chunk, take in JSON."""


class Choice:
    """The arrival, the read delay and the tokens of each chunk of one choice.

    Stored in columns, so that a stream of ten thousand tokens takes little memory while it is open.
    """

    __slots__ = (
        "add_count",
        "add_late",
        "add_ns",
        "add_text",
        "chars",
        "counts",
        "finish_reason",
        "has_empty_ids",
        "heads",
        "lates_ns",
        "silent",
        "texts",
        "times_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.lates_ns = array("q")
        self.counts = array("q")
        """``UNCOUNTED`` where the server does not count them."""
        self.texts: list[str] = []
        """The text of each chunk since the choice was last compacted; empty for a silent one."""
        self.heads: list[str] = []
        """The text of the chunks before those, and in ``chars`` the length of each."""
        self.chars = array("i")
        self.silent: list[int] = []
        """Positions of chunks that only a count shows; they are chunks only if the server continues to count."""
        self.finish_reason: str | None = None
        self.has_empty_ids = False
        """An empty list of token ids came: the server counts even when there is nothing to count."""
        self.add_ns = self.times_ns.append
        self.add_late = self.lates_ns.append
        self.add_count = self.counts.append
        self.add_text = self.texts.append

    def add(self, t_ns: int, late_ns: int, count: int | None, text: str | None) -> None:
        """Take a chunk; its text is None if it is silent."""
        if text is None:
            self.silent.append(len(self.times_ns))
        self.texts.append(text or "")
        self.times_ns.append(t_ns)
        self.lates_ns.append(late_ns)
        self.counts.append(UNCOUNTED if count is None else count)

    @property
    def is_counted(self) -> bool:
        """True when the server counts the tokens of all chunks."""
        return UNCOUNTED not in self.counts and (bool(self.counts) or self.has_empty_ids)

    @property
    def most_record_bytes(self) -> int:
        """The most that it can take in a record."""
        num_chars = sum(map(len, self.heads)) + sum(map(len, self.texts))
        return _CHAR_BYTES * num_chars + _CHUNK_BYTES * len(self.times_ns)

    def compact(self) -> None:
        """Join the texts into one and store their lengths, which is not done while tokens arrive."""
        if self.texts:
            self.chars.extend(map(len, self.texts))
            self.heads.append("".join(self.texts))
            self.texts.clear()

    def drop_silent(self) -> None:
        """Remove silent chunks of a compacted choice: its count stopped, so it did not show chunks."""
        for i in reversed(self.silent):
            del self.times_ns[i], self.lates_ns[i], self.counts[i], self.chars[i]
        self.silent.clear()


class Choices(dict[int, Choice]):
    """Choices by index, each made at its first event. Raises ExcessError for one that was not requested."""

    def __init__(self, num_requested: int) -> None:
        self._num_requested = num_requested

    def __missing__(self, index: int) -> Choice:
        if index >= self._num_requested:
            raise ExcessError(
                "unrequested-choice",
                f"the stream holds a choice {index} where choices 0 to {self._num_requested - 1} were requested",
            )
        choice = self[index] = Choice()
        return choice
