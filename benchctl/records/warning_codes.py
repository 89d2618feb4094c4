"""The table of all warning codes, with those of FLOPs, noise, comparisons and imports, and lookups in it."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final

from benchctl.records.schema import ResultWarning
from benchctl.records.warnings import (
    MEASURE_AGAIN,
    MEASURE_NOISE,
    NOTHING,
    RESTORE,
    RUN_WARNINGS,
    Severity,
    WarningCode,
    note,
    suspect,
    warning,
)

IMPORT_REPAIRS: Final = "Imported LenVM files: repaired or left out"
IMPORT_LIMITS: Final = "Imported LenVM files: limits"

WARNING_TABLE: Final[dict[str, dict[str, WarningCode]]] = RUN_WARNINGS | {
    "FLOPs": {
        "tokens-unknown": warning(
            "The tokens of a request are unknown, so FLOPs cannot be computed.", "Use an engine that reports usage."
        ),
        "no-completed-requests": warning(
            "No request with prompt and output completed, so FLOPs cannot be computed.",
            "Read the errors in requests.jsonl.",
        ),
        "failed-requests-in-step-log": warning(
            "The step log counts work of failed requests, which the observed FLOPs include.",
            "Measure again without failed requests.",
        ),
        "prompt-tokens-estimated": warning(
            "The engine reported no prompt tokens; those of the workload replace them.",
            "Use an engine that reports usage.",
        ),
        "choice-lengths-assumed": warning(
            "The lengths of single choices are unknown or disagree with usage, which is spread evenly over them.",
            "Send each sample as its own request (samples_as: requests).",
        ),
        "drafts-not-charged": warning(
            "Observed FLOPs leave out a part of what drafts cost: the draft model's shape or a count is unknown.",
            "Read the message; draft_model takes a model of the built-in table, or a directory with a config.json.",
        ),
        "drafts-without-model": note(
            "Drafts are looked up in text (ngram, suffix) and cost no FLOPs of a model; verification is charged.",
            NOTHING,
        ),
        "base-prefill-assumed": warning(
            "The step log does not count prefill tokens; one prompt per question is assumed.", NOTHING
        ),
        "candidates-unknown": warning(
            "The step log does not count the value model's candidates, so there are no observed FLOPs.",
            "Use a step log that counts candidates; published FLOPs charge top_k for each token.",
        ),
        "value-prefixes-assumed": warning(
            "The step log does not count the value model's prefix tokens; prompt and output of each sequence are "
            "assumed.",
            NOTHING,
        ),
        "model-shape-unknown": warning(
            "The shape of a model is unknown, so FLOPs cannot be computed.",
            "Name a model of the built-in table, or a directory with a config.json.",
        ),
        "floor-unknown": note(
            "No peaks of the device are known, so forward passes are not held against a least time.",
            "Measure the peaks with 'benchctl micro roofline'.",
        ),
        "hardware-differs": warning(
            "The profile names other hardware than the machine has, so FLOP/s are compared with no peak.",
            "Set hardware in the profile to the machine's own GPU.",
        ),
        "hardware-unknown": warning(
            "The GPU is not in the table of devices; FLOP/s are compared with the peaks of the profile's hardware.",
            "Check that the hardware named in the profile is equivalent.",
        ),
        "peaks-unreadable": warning(
            "The measured peaks of the result directory cannot be read; those of the data sheet are used.",
            "Restore or remove the file that the message names.",
        ),
        "peak-above-data-sheet": warning(
            "A measured peak is above the data sheet's by more than 3 %, which the device cannot reach.",
            "Check the name of the device, its clocks, and the version of torch; do not use these peaks.",
        ),
        "peak-of-cache": warning(
            "The buffers of copies and reads are less than 4 times the last-level cache, so that its bandwidth is "
            "part of what was measured.",
            "Measure with larger buffers (--buffer-mb).",
        ),
        "peak-unsteady": warning(
            "The rounds of a peak differ by more than 10 % in their middle half.",
            "End other programs, and measure again; on a GPU look for throttling.",
        ),
        "peak-on-busy-machine": warning(
            "Other programs used more than a tenth of the cores when peaks were measured.",
            "End other programs, and measure again.",
        ),
    },
    "A step-time model": {
        "drafts-not-fitted": warning(
            "Step times of drafts are those of a model that was fitted to steps with fewer query tokens for each "
            "decoding sequence than a verification has, or whose file does not record it.",
            "Fit the model to steps with as many drafts, or give the costs of drafts as constants.",
        ),
    },
    "The noise floor": {
        "noise-of-another-workload": warning(
            "The noise floor was measured with another request set.", "Run this workload as an A/A experiment."
        ),
        "noise-old": warning("The noise floor was measured more than 30 days earlier.", MEASURE_NOISE),
        "noise-of-another-version": warning(
            "The noise floor was measured with another version of the engine.", MEASURE_NOISE
        ),
        "noise-of-another-machine": warning(
            "The noise floor is that of a machine that measured no run, and is left out.",
            "Run the A/A experiment ('benchctl run NAME --aa') on the machine that measures.",
        ),
        "noise-of-another-server": note(
            "Noise is on file for this machine, but for another engine, model or other options of the server.",
            "Run the command that the message names: it measures the noise of this server.",
        ),
        "noise-unreadable": warning(
            "A stored noise floor cannot be read.", "Remove the file that the message names, and measure it again."
        ),
    },
    "Neighbours on the same host": {
        "neighbours-unchecked": warning(
            "Blocks ran at the same time on one node, and may have disturbed each other.",
            "Compare two A/A experiments, one with --parallel 1 and one with --parallel N, or give each block a "
            "whole node.",
        ),
    },
    "Altered files": {
        "altered-file": warning("A file is not the one that was recorded.", RESTORE),
        "missing-file": warning("A recorded file is missing.", RESTORE),
    },
    "A comparison": {
        "check-step-time": warning(
            "The steps of a run took longer than its wall time.", "Check the clock of the engine's step log."
        ),
        "check-greedy-share": warning(
            "Steps were greedy where sampling was declared, or the reverse.",
            "Compare the sampling parameters of the profile with what the server received.",
        ),
        "check-concurrency": warning(
            "More requests were in flight than the closed loop allows (Little's law).",
            "Report it with the result directory: one of the times is wrong.",
        ),
        "check-prefix-cache": warning(
            "The prefix cache had another share of the prompts of conversations than they can have.",
            "Raise the memory of its cache, lower the load, and let nobody else use the server.",
        ),
        "suspect-counted": warning(
            "Suspect runs count because of --allow-suspect; the verdict is only as good as they are.",
            "Measure these runs again, and compare without --allow-suspect.",
        ),
        "client-times-excluded": warning(
            "The client's times of some blocks do not count; what the server measured does.", MEASURE_AGAIN
        ),
        "excluded-block": warning("A block is left out, for the reason in the message.", MEASURE_AGAIN),
        "block-on-several-nodes": warning(
            "Runs of one block were measured on several nodes or devices, so it compares machines and is left out.",
            "Add a block in its place on one machine: 'benchctl run --resume DIR --blocks N'.",
        ),
        "experiment-unfinished": warning(
            "The experiment has not finished.", "Continue it with 'benchctl run --resume'."
        ),
        "no-scatter": warning(
            "Blocks are exactly alike: a simulator without noise, or copied runs.",
            "Do not apply the interval to a real machine.",
        ),
        "position-effect": warning(
            "A run's position in its block changes the metric; the estimate is that of equal positions.",
            "Look for warming or a neighbour on the machine; more blocks make the correction exact.",
        ),
        "ratio-drift": warning(
            "The ratio itself drifts from block to block, so one number does not describe it.",
            "Look at the single blocks, find what changed, and measure again.",
        ),
        "ladder-carry-over": warning(
            "Values or ratios of several loads on one server depend on the loads that came before them.",
            "Measure with per_server: fresh, where each load gets a server of its own.",
        ),
        "greedy-answers-differ": warning(
            "Draft tokens changed greedy answers more often than the baseline changes its own from block to block.",
            "Look at the answers: 'benchctl report' shows where they part. Verification must keep the tokens that "
            "the target model prefers; reduced precision, another batch shape or a defect does not.",
        ),
        "outlier-block": warning(
            "A block differs strongly from the others; the message gives the result without it.",
            "Look for its cause in the telemetry of that block.",
        ),
        "node-differs": warning(
            "The ratios on the nodes differ beyond chance; the verdict pools all blocks.",
            "Read the table by node, and look at the telemetry of the node that stands out.",
        ),
        "not-interleaved": warning(
            "The two directories were not interleaved in time, so drift of the machine looks like a change.",
            "Measure both sides in one experiment.",
        ),
        "unpaired": warning(
            "The directories share no blocks; intervals are unpaired and wider.",
            "Measure both sides in one experiment.",
        ),
        "same-runs": note("Both sides are the same runs.", "Name two different variants or directories."),
        "unmatched": warning(
            "An arm has no counterpart on the other side and is not compared.", "Measure it on both sides."
        ),
        "machines-differ": warning(
            "The two experiments ran on other machines, at other priorities, or with other versions.",
            "Measure both sides on one machine with the same software.",
        ),
        "foreign-results": warning(
            "Result files of other tools record neither order, configuration nor machine.",
            "Check that only the intended change separates the two sides.",
        ),
        "tools-differ": warning(
            "Different tools measured the two sides, so part of a difference may be theirs.",
            "Measure both sides with one tool.",
        ),
        "settings-unknown": warning(
            "Some settings are not recorded on both sides and are not compared.", "Check them yourself."
        ),
        "load-unmatched": warning("Only one side has this load.", "Measure the load on both sides."),
        "definition": note("Another tool defines a metric differently; the message says how.", NOTHING),
    },
    IMPORT_REPAIRS: {
        "usage-duplicated": warning(
            "The usage of a request is repeated for each of its choices; it is counted once.", NOTHING
        ),
        "log-restarted": warning(
            "The step log holds several lifetimes of a server; those that produced the answers count.", NOTHING
        ),
        "line-cut": warning("A file ends within a line, which is left out.", "Copy the file again."),
        "lines-damaged": warning("Lines that are not records are left out.", "Copy the file again."),
        "questions-unanswered": warning("Questions failed or have no line.", "Run the script again."),
        "answers-resumed": suspect(
            "The client was restarted and reused earlier answers, so wall_s is valid for neither run.",
            "Run the script again from the start.",
        ),
    },
    IMPORT_LIMITS: {
        "wall-holds-client": warning(
            "wall_clock_s of the source includes the client's start; wall_s here does not.", NOTHING
        ),
        "value-model-load-measured": warning(
            "The value model was loaded within the measured load.", "Warm the server up with a guided request."
        ),
        "greedy-records": warning(
            "Greedy steps count as steps here; the project's own columns leave them out.", NOTHING
        ),
        "sampling-unrecorded": warning(
            "Sampling parameters are recorded nowhere; defaults replace them.", "Keep the command line."
        ),
        "sections-async": warning(
            "Sections are host time; the first blocking call is charged for all queued GPU work.", NOTHING
        ),
        "steps-are-samplers": warning(
            "The step log times the sampler alone, so step_ms is unknown.", "Compare wall_s instead."
        ),
        "steps-unrecorded": warning("The source has no step log.", "Compare wall_s instead."),
        "averages-cumulative": warning(
            "The server printed averages since its start and synchronized the device around each section.", NOTHING
        ),
        "overlap-differs": warning(
            "The project's scripts disable overlapped scheduling on guided servers only, which adds to the "
            "difference.",
            "Measure the flags apart, with controls in a profile of benchctl.",
        ),
        "sends-reconstructed": warning(
            "Send times are reconstructed from latencies and concurrency, with retries included.", NOTHING
        ),
        "models-assumed": warning(
            "No file names the models, so FLOPs are those of assumed ones.", "Name them: --model, --value-model."
        ),
        "gpu-unattributed": warning(
            "GPU samples cover every device of the host, not only those of the server.", NOTHING
        ),
    },
}
"""Warning codes by topic and code; the order is that of the reference."""

CHECKS: Final[dict[str, str]] = {
    "requests": "Requests sent equal those completed plus those failed, and each prepared request has one record.",
    "client-tokens": "The tokens that the client received equal usage, request by request.",
    "step-tokens": "The output tokens of all steps equal usage.",
    "counters": "The growth of the server's token counter equals usage.",
    "prefix-cache": "No prompt token came from a prefix cache, or the planned ones, unless the profile allows it.",
    "turns": "Each turn was sent after the answer before it and the time that its user thinks.",
    "draft-counters": "The growth of the server's counters of drafts equals the sums over steps, also by position.",
    "accepted-drafts": "No more draft tokens were accepted than drafted, nor at a position than at the one before.",
    "speculation": "Tokens were drafted where the options of the server say so, and nowhere else.",
    "step-time": "The steps took no longer than the wall time.",
    "guided": "Steps were guided where the profile declares guidance, and nowhere else.",
    "greedy-share": "Steps were greedy where that is declared, and nowhere else.",
    "forced-stop": "Each answer has its declared length.",
    "concurrency": "No more requests were in flight than the closed loop allows (Little's law).",
}
"""Reconciliation checks by name. One that fails and is fatal emits ``check-failed``, any other ``check-<name>``."""

FINDINGS: Final[dict[str, str]] = {
    "greedy-path": "All steps of a guided cell were greedy, so the value model never ran.",
    "flat": "The overhead of a variant does not depend on the swept factor.",
    "not-flat": "The overhead of a variant grows or shrinks with the swept factor.",
    "place-on-curve": "A variant differs from the baseline under some of the loads of a curve.",
    "speculation-never-drafted": "A server that is configured to draft tokens never did.",
    "speculation-cannot-win": "A sequence gains no more than one token per step from its drafts.",
    "unexplained-by-flops": "More FLOPs explain only a part of a slowdown.",
    "noisy-baseline": "The baseline scatters more than the other cells, so a ratio to a single run misleads.",
    "lazy-load-in-warmup": "The value model was loaded during the warm-up.",
    "lazy-load-measured": "The value model was loaded during the measured load, whose times include it.",
}
"""Findings by code: conclusions that the numbers support, in the findings list of a report."""

WARNING_CODES: Final[dict[str, WarningCode]] = dict(chain.from_iterable(t.items() for t in WARNING_TABLE.values()))
SUSPECT_CODES: Final = frozenset(code for code, entry in WARNING_CODES.items() if entry.severity == "suspect")
"""Codes that make a run suspect."""
CLIENT_SUSPECT_CODES: Final = frozenset(code for code, entry in WARNING_CODES.items() if entry.limits_client_times)
"""Codes that make a run suspect only in what the client timed."""
LIGHTER_LOAD_CODES: Final = frozenset(code for code, entry in WARNING_CODES.items() if entry.has_lighter_load)
"""Codes that say that the server met fewer requests at once than planned."""
CHECK_FAILED: Final = "check-failed"
"""Code of a run whose records contradict each other."""


def severity_of(code: str) -> Severity:
    """Return the severity of a code; ``warning`` for one that an older or newer benchctl wrote."""
    entry = WARNING_CODES.get(code)
    return "warning" if entry is None else entry.severity


def by_severity(warnings: Iterable[ResultWarning]) -> tuple[ResultWarning, ...]:
    """Sort warnings: those that make a run suspect, other warnings, notes; equal ones keep their order."""
    ranks = ("suspect", "warning", "note")
    return tuple(sorted(warnings, key=lambda warning: ranks.index(severity_of(warning.code))))


def warnings_of(messages: Mapping[str, str | None]) -> tuple[ResultWarning, ...]:
    """The warnings by code that have a message, in order."""
    return tuple(ResultWarning(code=code, message=text) for code, text in messages.items() if text is not None)
