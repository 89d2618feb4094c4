"""The looks at an experiment at which it could have ended, and the confidence of its intervals that they leave."""

from benchctl.profile.looks import look_alpha
from benchctl.records.loaded import LoadedResults
from benchctl.records.record import Manifest


def looked_confidence(a: LoadedResults, b: LoadedResults, confidence: float) -> float:
    """The confidence of each interval of two compared experiments, or of one twice, after the looks at them.

    Intervals of this confidence at every look hold together with ``confidence``: by the table where a rule declared
    the looks (``profile/looks.py``), and by the union bound where blocks were added, because nobody knows when. Of
    two experiments each end of one may meet each end of the other: the one with fewer looks divides what may be
    missed.
    """
    alpha, (fewer, more) = 1 - confidence, sorted((a, b), key=lambda results: _num_looks(results.manifest))
    if a.manifest != b.manifest:
        alpha /= _num_looks(fewer.manifest)
    rule, num_looks = more.manifest.stopping, _num_looks(more.manifest)
    if rule is None:
        return 1 - alpha / num_looks
    most, num_begun = rule.look_blocks[-1], 1 + max((run.record.block for run in more.runs), default=-1)
    return 1 - look_alpha(alpha, num_looks, most, is_last=num_begun >= most)


def num_looks_of(a: Manifest, b: Manifest) -> int:
    """Number of looks at which two compared experiments could have ended; 1 where their blocks were fixed.

    Who adds blocks to an experiment could have ended it before: every extension is one more look, whether or not
    anybody looked. Of two experiments the numbers are multiplied.
    """
    return _num_looks(a) * (1 if a == b else _num_looks(b))


def _num_looks(manifest: Manifest) -> int:
    return len(manifest.stopping.look_blocks) if manifest.stopping is not None else 1 + len(manifest.extensions)


def num_extensions_of(a: Manifest, b: Manifest) -> int:
    """Number of times that blocks were added to either of two experiments."""
    return len(a.extensions) + (0 if a == b else len(b.extensions))
