"""Files, texts and numbers that others wrote, of unknown origin: read within bounds and shown without harm.

The bounds: sizes beyond which input is refused unread. Each is far above honest input and far below what harms a
machine.
"""

from typing import Final

PROFILE_BYTES: Final = 1 << 20
"""A profile, with each file that it extends."""
STORED_PROFILE_BYTES: Final = 8 << 20
"""A ``profile.yaml`` of a result directory, which has all that it extended and every default."""
PROFILE_NODES: Final = 20_000
"""Keys, values and lists of a profile; a stored one has its defaults beside them."""
STORED_PROFILE_NODES: Final = 60_000
PROFILE_DEPTH: Final = 32
"""Mappings and lists of a profile inside one another."""
EXTENDED_FILES: Final = 16
"""Files in a row of which each extends the next."""
DOCUMENT_BYTES: Final = 64 << 20
"""A JSON document of a result directory, or of a model, that is read whole."""
FOREIGN_BYTES: Final = 256 << 20
"""A result of another tool, which may hold the time of every token, and is read whole."""
ROWS_BYTES: Final = 4 << 30
"""A file of rows that are all kept, such as prompts or steps: the largest published data set has 0.7 GB."""
LOG_BYTES: Final = 64 << 30
"""A JSON Lines file of a result directory, which is read piece by piece."""
SEARCHED_ENTRIES: Final = 200_000
"""Entries of a directory and all below it that are looked through for files of another tool."""
LINE_BYTES: Final = 16 << 20
"""One line of a stream from a server, and one line of JSON Lines."""
PROMPT_TOKENS: Final = 1 << 24
"""Tokens of one prompt or output in a file of a data set: the longest contexts of models are 10 million."""
RESPONSE_HEAD_BYTES: Final = 64 << 10
"""Status line and headers of a response."""
TEMPLATE_BYTES: Final = 1 << 30
"""Memory for the chat template of a model, which is a program, and some hundred chats with their texts ..."""
TEMPLATE_S: Final = 10
"""... and processor time; honest ones take milliseconds."""
VALUE_CHARS: Final = 60
"""A value of a file within a message."""
RESPONSE_HEADERS: Final = 256
"""Number of headers of a response."""
ERROR_BODY_BYTES: Final = 64 << 10
"""The body of a response that is not the one that was asked for; more of it is not read."""
TAIL_BYTES: Final = 64 << 10
"""What follows the event that says that a stream is over."""
TOKEN_BYTES: Final = 8 << 10
"""One streamed token, with all that surrounds it: events take 200 to 700 bytes, log probabilities some thousand."""
EVENT_VALUES: Final = 1 << 18
"""JSON values of one event of a stream; an object in memory takes fifty times its shortest text."""
PAGE_BYTES: Final = 16 << 20
"""A document that a server states of itself, such as the description of its API."""
METRICS_BYTES: Final = 4 << 20
"""A page of counters, which is parsed while a load is measured ..."""
METRICS_LINES: Final = 50_000
"""... in about 25 microseconds a line ..."""
METRICS_LINE_CHARS: Final = 1 << 14
"""... and in a time that grows with the square of the labels of a line."""
MESSAGE_CHARS: Final = 2_000
"""A text from outside within a message, a table or a page."""
ARCHIVE_BYTES: Final = 256 << 30
"""All files of an archive together."""
ARCHIVE_ENTRIES: Final = 50_000
"""Files and folders of an archive: 4,000 runs of ten files leave room for more."""
ARCHIVE_DEPTH: Final = 16
"""Folders of an archive inside one another."""
ARCHIVE_HEADER_BYTES: Final = 64 << 10
"""What stands before a file of an archive: its name, size and attributes."""
ARCHIVE_RATIO: Final = 500
"""Bytes of files to compressed bytes of an archive: step logs of the simulator, which repeat most, reach 60 ..."""
ARCHIVE_RATIO_FREE_BYTES: Final = 256 << 20
"""... beyond this size; below it, nothing is harmed."""
