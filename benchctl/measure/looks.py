"""An experiment that may end early: takes the looks of its stopping rule when they are due, and records them."""

import math
from collections.abc import Callable, Collection
from typing import TypeAlias

import msgspec

from benchctl.analysis.compare.metric_comparison import roles_of
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.stopping import take_look
from benchctl.profile.model import Profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.manifest import Look, StoppingRecord

OnLook: TypeAlias = Callable[[Look, StoppingRecord], None]


class Looks:
    """The looks of one experiment; with a fixed number of blocks there are none."""

    def __init__(self, results: ResultDirectory, profile: Profile, on_look: OnLook) -> None:
        roles = roles_of(profile.primary_metrics, is_forced=profile.stop != "natural")
        self._metrics = tuple(name for name, role in roles.items() if role == "deciding")
        self._results = results
        self._on_look = on_look
        self._rule = results.manifest().stopping

    def take(self, num_blocks: int, infeasible: Collection[str]) -> None:
        """Take each look that is due after ``num_blocks`` blocks and was not taken yet.

        Cells in ``infeasible``, which no server can run, are left out.
        """
        rule = self._rule
        if rule is None or rule.ended_after is not None:
            return
        blocks_with_look = {look.num_blocks for look in rule.looks}
        for due in rule.look_blocks:
            if due > num_blocks or due in blocks_with_look:
                continue
            look = take_look(load_experiment(self._results.path), rule, due, self._metrics, left_out=infeasible)
            self._rule = rule = msgspec.structs.replace(rule, looks=(*rule.looks, look))
            self._results.write_manifest(msgspec.structs.replace(self._results.manifest(), stopping=rule))
            self._on_look(look, rule)
            if look.is_precise:
                return

    def is_needless(self, block: int) -> bool:
        ended = None if self._rule is None else self._rule.ended_after
        return block >= (math.inf if ended is None else ended)
