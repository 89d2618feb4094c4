"""Errors of guided decoding; both end a command with exit code 2, and a server turns the first into HTTP 400."""

from benchctl.errors import UsageError


class GuidanceError(UsageError, ValueError):
    """A request asks for guidance that does not exist; the message names key, value and remedy."""


class CheckpointError(UsageError):
    """A value model cannot be read; the message names the directory, the error and the remedy."""
