"""Slurm's own programs, as far as they are called here."""

import subprocess
from collections.abc import Sequence
from typing import Final

LIMIT_S: Final = 30.0
"""A controller under load answers late; one that is away never does."""


class SlurmCommandError(Exception):
    """A program of Slurm that is absent, fails, or does not answer in time; the message is its own."""


def slurm_output(words: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """The output of a program of Slurm. Raises SlurmCommandError."""
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=limit_s, check=False
        )
    except FileNotFoundError as error:
        raise SlurmCommandError(f"{words[0]} is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmCommandError(f"{words[0]} gave no answer in {limit_s:.0f} s") from error
    except OSError as error:
        raise SlurmCommandError(f"{words[0]}: {error.strerror}") from error
    if done.returncode != 0:
        message = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise SlurmCommandError(message or f"{words[0]} ended with exit code {done.returncode}")
    return done.stdout
