"""The table of all warning codes: what each says about the numbers, and what to do about it.

A new warning is one entry here and one emission elsewhere; ``docs/reference/warnings.md`` is generated from this
table (``warning_codes.warnings_reference``) and a test holds it against the code in both directions.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

Severity: TypeAlias = Literal["suspect", "warning", "note"]


@dataclass(frozen=True, slots=True)
class WarningCode:
    """One kind of warning.

    ``suspect`` keeps a run from counting as done, ``warning`` limits what may be concluded, ``note`` is for
    information.
    """

    severity: Severity
    meaning: str
    remedy: str
    limits_client_times: bool = False
    """A run is suspect only in what the client timed; steps and tokens, which the server measured, still count."""
    has_lighter_load: bool = False
    """The server met fewer requests at once than planned."""


_suspect: Final = partial(WarningCode, "suspect")
_client_suspect: Final = partial(_suspect, limits_client_times=True)
_load_suspect: Final = partial(_client_suspect, has_lighter_load=True)
_warning: Final = partial(WarningCode, "warning")
_note: Final = partial(WarningCode, "note")

_MEASURE_AGAIN: Final = "Measure again with 'benchctl run --resume'."
_FREE_CORE: Final = "Free a processor core for the client, or lower the load."
_NOTHING: Final = "Nothing; keep it in mind."
_RESTORE: Final = "Restore the file from a copy, or measure again; 'benchctl verify' lists every alteration."
_MEASURE_NOISE: Final = "Measure it again with 'benchctl run NAME --aa'."

IMPORT_REPAIRS: Final = "Imported LenVM files: repaired or left out"
IMPORT_LIMITS: Final = "Imported LenVM files: limits"

WARNING_TABLE: Final[dict[str, dict[str, WarningCode]]] = {
    "The load client": {
        "slots-idle": _load_suspect(
            "Slots of a closed loop were empty for more than 1 % of their time while requests were waiting.",
            "Free a processor core for the client, lower the load, or let the server keep connections open.",
        ),
        "sends-delayed": _load_suspect(
            "Requests repeatedly left later than planned, so the load was not the one that the profile asks for.",
            _FREE_CORE,
        ),
        "rate-missed": _load_suspect(
            "The client sent fewer requests per second than planned, and no cap explains it.",
            "Free a processor core for the client, or lower the rate.",
        ),
        "sends-unlike-poisson": _warning(
            "The gaps between sends are not those of the Poisson process that was planned: their Kolmogorov "
            "distance from it is beyond the 5 % limit, 1.358 / sqrt(gaps), and beyond that of the plan.",
            "Free a processor core for the client, or lower the rate.",
        ),
        "arrival-times-unreliable": _client_suspect(
            "Most arrival times may be wrong because the client read them late.",
            _FREE_CORE,
        ),
        "client-cpu": _client_suspect(
            "A process of the load generator used nearly all of its core, so it may have set the pace itself.",
            "Lower the load, or give it more processes with load.workers.",
        ),
        "times-bounded": _warning(
            "Some arrivals are known between bounds only; the metrics named in the message decide nothing.",
            "Free a processor core for the client, and measure again.",
        ),
        "event-loop-stalls": _warning(
            "The client's event loop repeatedly stalled for over 100 ms; refills and timeout checks may have been "
            "late.",
            _FREE_CORE,
        ),
        "rate-capped": _warning(
            "A cap of the profile held planned requests back; that wait is in no latency (coordinated omission).",
            "Raise max_concurrency or launch_rate_limit, or use a closed loop.",
        ),
        "wall-clock-set": _warning(
            "The system clock was set during the load, so the client's own timestamps replace the kernel's.",
            "Keep the clock of the measuring machine steady during a run.",
        ),
        "other-transport": _warning(
            "Requests used the fallback transport (TLS) or were redirected, which costs the client more.",
            "Name the final address of the server, without TLS on a network that you trust.",
        ),
        "client-bunching": _warning(
            "Tokens reached the client in bursts; ttft, itl and tpot are not trustworthy and decide nothing.",
            "Free processor cores for the client and for the server's front end, then measure again.",
        ),
        "server-coalescing": _note(
            "The server regularly writes several chunks at once; itl is the time between those writes.", _NOTHING
        ),
        "underfilled-batch": _warning(
            "Requests spent much of their time outside the engine's steps, so the batch was smaller than the load.",
            "Lower the load below max_num_seqs, or free processor cores for the server's front end.",
        ),
    },
    "A run": {
        "failed-requests": _suspect(
            "Some requests failed; they stay in every denominator and make a comparison incomplete.",
            "Read their errors in requests.jsonl and the server's log, then measure again.",
        ),
        "below-floor": _suspect(
            "A forward pass took less time than its FLOPs and bytes allow: something else was timed. The run is a "
            "failed one and counts nowhere.",
            "Read the message; name the device's own hardware, and measure again.",
        ),
        "replays-allocate": _warning(
            "A device handed out memory while forward passes were timed: some of them waited for it.",
            "Measure with more warm-up passes (engine.options.warmups), or a smaller pass.",
        ),
        "warmup-failed": _suspect(
            "Requests of the warm-up failed, so the load may have met a cold server.",
            "Read the server's log, then measure again.",
        ),
        "check-failed": _suspect(
            "Two independent records of the run contradict each other, so its numbers are invalid.",
            "Read the message: it names the reconciliation check (see below) and both values.",
        ),
        "finish-reason-unknown": _suspect(
            "Answers ended with a finish_reason that no engine is known to use, so they may be no answers.",
            "Ask the server's owner what the word means; --allow-suspect counts the answers as they are.",
        ),
        "output-ended-early": _suspect(
            "Answers of a forced length ended early although usage counts all their tokens: the server did less "
            "work than was asked for.",
            "Name the server's own dialect, whose spelling of ignore_eos it heeds, and measure again.",
        ),
        "output-tokens-unseen": _note(
            "Far fewer chunks came than usage counts tokens, and the server does not count the tokens of a chunk.",
            "Name the server's own dialect where it counts tokens; speculation and coalescing look the same.",
        ),
        "prompt-tokens-differ": _suspect(
            "The server counted other prompt lengths than were asked for or counted beforehand, or two servers "
            "count the same prompts differently. A run of an older version counts all the same.",
            "Count and write prompts with the model's own tokenizer (workload.tokenizer), and measure again.",
        ),
        "prompt-tokens-unconfirmed": _note(
            "Planned prompt lengths were estimated and the server counts others, or no usage says what it counted.",
            "Name the model's tokenizer in workload.tokenizer where predictions shall rest on these lengths.",
        ),
        "steps-damaged": _suspect(
            "The engine's step log cannot be read to its end.",
            "Keep the log (steps.raw.*), report it with the engine's version, and measure again.",
        ),
        "steps-missing": _suspect(
            "The engine's step log holds no steps, so the time per step is unknown.",
            "Check that the engine's version supports the step log ('benchctl doctor').",
        ),
        "value-passes-recorded-late": _suspect(
            "Steps of the load recorded passes of the value model, of sizes that were not recorded before it.",
            "Leave value_recording on, raise max_num_seqs, for which passes are recorded, or workload.num_warmups.",
        ),
        "value-kernels-missing": _note(
            "A server with a GPU computed its value model by torch alone, because kernels cannot run there or give "
            "other values.",
            "Read the reason; a comparison needs both sides alike, as with value_kernels: false.",
        ),
        "kv-memory-computed": _note(
            "All servers got one size of KV cache, computed from what the one with the largest value model needs.",
            "Nothing; state engine.options.kv_cache_memory_bytes to choose the size yourself.",
        ),
        "simulated": _note(
            "The runs were simulated in virtual time, without server, client or network; times are a cost model's.",
            "Nothing; measure with 'benchctl run' what a decision rests on.",
        ),
        "measured-elsewhere": _note(
            "The directory was created on a machine that does not measure, such as a login node.",
            "Nothing; devices and drivers are in the record of each run.",
        ),
        "steps-unknown": _note(
            "The engine records no steps, so the time per step is unknown.", "Compare wall_s or tpot_ms instead."
        ),
        "damaged-line": _warning(
            "A file of the run contains a line that cannot be read; what precedes it is kept.",
            "Restore the file from a copy, or measure again.",
        ),
        "configuration-unknown": _warning(
            "The server did not report its configuration, so nothing proves that only the declared factor differs.",
            "Use an engine that reports its configuration, or check the command lines yourself.",
        ),
        "repeated-run": _note("The run needed more than one attempt.", _NOTHING),
        "profile-unreadable": _warning(
            "The stored profile cannot be read, so settings and FLOPs of the runs are unknown.",
            "Restore profile.yaml from a copy.",
        ),
        "dataset-substituted": _note(
            "The dataset is not on this machine; generated word problems replace it.",
            "Get it with 'benchctl data fetch', or name a file in workload.path.",
        ),
        "prompt-lengths-estimated": _note(
            "No tokenizer counted the prompts before the load; their planned lengths are an estimate.",
            "Name a tokenizer in workload.tokenizer; 'usage' has the server's own counts.",
        ),
        "natural-lengths-cut": _warning(
            "Some natural lengths are those of answers that max_tokens cut.",
            "Raise workload.max_tokens where the natural lengths are measured.",
        ),
    },
    "The server": {
        "server-not-fresh": _warning(
            "Another program started the server, so it is not fresh and its process and GPU are not recorded.",
            "Let benchctl start the server where caches of earlier requests matter.",
        ),
        "server-survivor": _warning(
            "A process of the server survived SIGKILL and shares the machine with the next runs.",
            "End the process, then measure the following runs again.",
        ),
        "server-log-incomplete": _warning(
            "The process that writes the server's log without secrets ended before the server, or not in time.",
            "Look for what ended it, such as a lack of memory or disk space.",
        ),
        "raw-log-kept": _warning(
            "The run keeps the server's log with its secrets, because of --keep-raw-logs.",
            "Delete server.raw.log before you share the directory.",
        ),
        "secrets-redacted": _note(
            "Secrets in what servers wrote were replaced by marks such as [redacted: HF_TOKEN].", _NOTHING
        ),
        "shared-memory-left": _warning(
            "The server left shared memory behind.", "Remove the segments below /dev/shm that the message names."
        ),
        "port-held": _warning(
            "The server's port was still in use after the server was stopped.", "Find and end its owner."
        ),
        "prefix-cache": _warning(
            "Prompt tokens came from the server's prefix cache, so ttft is that of a warm cache.",
            "Choose another --seed, or switch the prefix cache off.",
        ),
        "prefix-hits-differ": _warning(
            "Servers of others found unequal shares of the prompts in their prefix caches.",
            "Leave engine.options.bypass_prefix_cache on, or warm both caches with one run each and measure again.",
        ),
        "sim-lag": _warning(
            "The simulator fell behind its own clock, so the client's times are longer than the simulated ones.",
            "Lower time_scale, or free the machine; steps are exact.",
        ),
        "sim-far-behind": _client_suspect(
            "The simulator stood still or fell behind its own clock by more than 2 % of the load and half "
            "a second: the client's times are not those of the simulated server.",
            "Free the machine, or lower time_scale, and measure again; steps are exact and count.",
        ),
        "sim-schedule-lost": _warning(
            "Announced requests did not come, so arrivals and steps depend on the machine's timing.",
            "Free the machine, and measure again.",
        ),
        "request-field-unknown": _warning(
            "The server's description of its requests lacks a field of request.extra_body; vLLM ignores such.",
            "Correct its spelling, or drop it; the server's /openapi.json lists the fields of this version.",
        ),
        "request-field-simulated": _note(
            "The simulator takes fields of requests that cost time on a real server, and charges nothing for them.",
            "Measure them on a real engine.",
        ),
    },
    "GPU and samplers": {
        "gpu-sampler-missing": _note(
            "No GPU is visible to NVML or nvidia-smi; use, power, clocks and throttling are unknown.",
            "Install the driver's tools, or check CUDA_VISIBLE_DEVICES ('benchctl doctor').",
        ),
        "gpu-unreadable": _warning(
            "A visible GPU cannot be read; the others are sampled, and the GPU metrics of the run are unknown.",
            "Look at 'nvidia-smi -q' and 'dmesg'; reset it, reboot, or leave it out with CUDA_VISIBLE_DEVICES.",
        ),
        "gpu-lost": _warning(
            "A GPU stopped answering during the load; its samples end there, and the GPU metrics are unknown.",
            "Look at 'dmesg' for an Xid error of this device, reset it or reboot, and measure again.",
        ),
        "gpu-unknown-name": _warning(
            "CUDA_VISIBLE_DEVICES names a device that is not here; what it means is not sampled.",
            "Correct it: 'nvidia-smi -L' lists indices and identities, of MIG devices, too.",
        ),
        "gpu-partitioned": _note(
            "The server has a MIG device, a part of a GPU, and samples are of the whole GPU.",
            "Keep the other parts idle, or read no GPU metric of this run.",
        ),
        "gpu-field-unknown": _note(
            "nvidia-smi of this driver lacks a field that is sampled; what it says is unknown.",
            "Install the driver's library libnvidia-ml, which NVML reads, or a newer driver.",
        ),
        "gpu-sampler-failed": _warning(
            "The GPU sampler stopped early; its samples do not cover the whole load.", _MEASURE_AGAIN
        ),
        "host-sampler-failed": _warning(
            "The host sampler stopped early; its samples do not cover the whole load.", _MEASURE_AGAIN
        ),
        "prometheus-sampler-failed": _warning(
            "Sampling the server's counters stopped early; its samples do not cover the whole load.", _MEASURE_AGAIN
        ),
        "gpu-memory-held": _warning(
            "GPU memory was still in use after the server was stopped, so the next run may have had less of it.",
            "Find its owner with nvidia-smi, and measure again.",
        ),
        "foreign-gpu-process": _warning(
            "Another program used a GPU of the run; the gate of the same name excludes such runs.",
            "Keep the GPU to yourself, and measure again.",
        ),
        "gpu-throttled": _warning(
            "A GPU slowed itself down during the load; the gate 'throttling' excludes such runs.",
            "Improve cooling or power supply, or lock the clocks below the limit.",
        ),
        "gpu-power-capped": _warning(
            "The power limit held the clocks of a GPU down, as is normal on busy devices.",
            "Nothing, as long as both sides run at the same power limit.",
        ),
    },
    "FLOPs": {
        "tokens-unknown": _warning(
            "The tokens of a request are unknown, so FLOPs cannot be computed.", "Use an engine that reports usage."
        ),
        "no-completed-requests": _warning(
            "No request with prompt and output completed, so FLOPs cannot be computed.",
            "Read the errors in requests.jsonl.",
        ),
        "failed-requests-in-step-log": _warning(
            "The step log counts work of failed requests, which the observed FLOPs include.",
            "Measure again without failed requests.",
        ),
        "prompt-tokens-estimated": _warning(
            "The engine reported no prompt tokens; those of the workload replace them.",
            "Use an engine that reports usage.",
        ),
        "choice-lengths-assumed": _warning(
            "The lengths of single choices are unknown or disagree with usage, which is spread evenly over them.",
            "Send each sample as its own request (samples_as: requests).",
        ),
        "drafts-not-charged": _warning(
            "Observed FLOPs leave out a part of what drafts cost: the draft model's shape or a count is unknown.",
            "Read the message; draft_model takes a model of the built-in table, or a directory with a config.json.",
        ),
        "drafts-without-model": _note(
            "Drafts are looked up in text (ngram, suffix) and cost no FLOPs of a model; verification is charged.",
            _NOTHING,
        ),
        "base-prefill-assumed": _warning(
            "The step log does not count prefill tokens; one prompt per question is assumed.", _NOTHING
        ),
        "candidates-unknown": _warning(
            "The step log does not count the value model's candidates, so there are no observed FLOPs.",
            "Use a step log that counts candidates; published FLOPs charge top_k for each token.",
        ),
        "value-prefixes-assumed": _warning(
            "The step log does not count the value model's prefix tokens; prompt and output of each sequence are "
            "assumed.",
            _NOTHING,
        ),
        "model-shape-unknown": _warning(
            "The shape of a model is unknown, so FLOPs cannot be computed.",
            "Name a model of the built-in table, or a directory with a config.json.",
        ),
        "floor-unknown": _note(
            "No peaks of the device are known, so forward passes are not held against a least time.",
            "Measure the peaks with 'benchctl micro roofline'.",
        ),
        "hardware-differs": _warning(
            "The profile names other hardware than the machine has, so FLOP/s are compared with no peak.",
            "Set hardware in the profile to the machine's own GPU.",
        ),
        "hardware-unknown": _warning(
            "The GPU is not in the table of devices; FLOP/s are compared with the peaks of the profile's hardware.",
            "Check that the hardware named in the profile is equivalent.",
        ),
        "peaks-unreadable": _warning(
            "The measured peaks of the result directory cannot be read; the data sheet's stand for them.",
            "Restore or remove the file that the message names.",
        ),
        "peak-above-data-sheet": _warning(
            "A measured peak is above the data sheet's by more than 3 %, which the device cannot reach.",
            "Check the name of the device, its clocks, and the version of torch; do not use these peaks.",
        ),
        "peak-of-cache": _warning(
            "The buffers of copies and reads are less than 4 times the last-level cache, so that its bandwidth is "
            "part of what was measured.",
            "Measure with larger buffers (--buffer-mb).",
        ),
        "peak-unsteady": _warning(
            "The rounds of a peak differ by more than 10 % in their middle half.",
            "End other programs, and measure again; on a GPU look for throttling.",
        ),
        "peak-on-busy-machine": _warning(
            "Other programs used more than a tenth of the cores when peaks were measured.",
            "End other programs, and measure again.",
        ),
    },
    "A step-time model": {
        "drafts-not-fitted": _warning(
            "Step times of drafts are those of a model that was fitted to steps with fewer query tokens for each "
            "decoding sequence than a verification has, or whose file does not record it.",
            "Fit the model to steps with as many drafts, or give the costs of drafts as constants.",
        ),
    },
    "The noise floor": {
        "noise-of-another-workload": _warning(
            "The noise floor was measured with another request set.", "Run this workload as an A/A experiment."
        ),
        "noise-old": _warning("The noise floor was measured more than 30 days earlier.", _MEASURE_NOISE),
        "noise-of-another-version": _warning(
            "The noise floor was measured with another version of the engine.", _MEASURE_NOISE
        ),
        "noise-of-another-machine": _warning(
            "The noise floor is that of a machine that measured no run, and is left out.",
            "Run the A/A experiment ('benchctl run NAME --aa') on the machine that measures.",
        ),
        "noise-of-another-server": _note(
            "Noise is on file for this machine, but for another engine, model or other options of the server.",
            "Run the command that the message names: it measures the noise of this server.",
        ),
        "noise-unreadable": _warning(
            "A stored noise floor cannot be read.", "Remove the file that the message names, and measure it again."
        ),
    },
    "Neighbours on the same host": {
        "neighbours-unchecked": _warning(
            "Blocks ran at the same time on one node, and may have disturbed each other.",
            "Compare two A/A experiments, one with --parallel 1 and one with --parallel N, or give each block a "
            "whole node.",
        ),
    },
    "Altered files": {
        "altered-file": _warning("A file is not the one that was recorded.", _RESTORE),
        "missing-file": _warning("A recorded file is missing.", _RESTORE),
        "altered-plan": _warning("Runs contradict the plan or their own times.", _RESTORE),
        "altered-requests": _warning("The request set is not the one that was sent.", _RESTORE),
        "copied-run": _warning("A run is a copy of another one.", "Remove the copy, and measure the run."),
    },
    "A comparison": {
        "check-step-time": _warning(
            "The steps of a run took longer than its wall time.", "Check the clock of the engine's step log."
        ),
        "check-greedy-share": _warning(
            "Steps were greedy where sampling was declared, or the reverse.",
            "Compare the sampling parameters of the profile with what the server received.",
        ),
        "check-concurrency": _warning(
            "More requests were in flight than the closed loop allows (Little's law).",
            "Report it with the result directory: one of the times is wrong.",
        ),
        "suspect-counted": _warning(
            "Suspect runs count because of --allow-suspect; the verdict is only as good as they are.",
            "Measure these runs again, and compare without --allow-suspect.",
        ),
        "client-times-excluded": _warning(
            "The client's times of some blocks do not count; what the server measured does.", _MEASURE_AGAIN
        ),
        "excluded-block": _warning("A block is left out, for the reason in the message.", _MEASURE_AGAIN),
        "block-on-several-nodes": _warning(
            "Runs of one block were measured on several nodes or devices, so it compares machines and is left out.",
            "Add a block in its place on one machine: 'benchctl run --resume DIR --blocks N'.",
        ),
        "experiment-unfinished": _warning(
            "The experiment has not finished.", "Continue it with 'benchctl run --resume'."
        ),
        "no-scatter": _warning(
            "Blocks are exactly alike: a simulator without noise, or copied runs.",
            "Do not apply the interval to a real machine.",
        ),
        "position-effect": _warning(
            "A run's position in its block changes the metric; the estimate is that of equal positions.",
            "Look for warming or a neighbour on the machine; more blocks make the correction exact.",
        ),
        "ratio-drift": _warning(
            "The ratio itself drifts from block to block, so one number does not describe it.",
            "Look at the single blocks, find what changed, and measure again.",
        ),
        "greedy-answers-differ": _warning(
            "Draft tokens changed greedy answers more often than the baseline changes its own from block to block.",
            "Look at the answers: 'benchctl report' shows where they part. Verification must keep the tokens that "
            "the target model prefers; reduced precision, another batch shape or a defect does not.",
        ),
        "outlier-block": _warning(
            "A block differs strongly from the others; the message gives the result without it.",
            "Look for its cause in the telemetry of that block.",
        ),
        "node-differs": _warning(
            "The ratios on the nodes differ beyond chance; the verdict pools all blocks.",
            "Read the table by node, and look at the telemetry of the node that stands out.",
        ),
        "not-interleaved": _warning(
            "The two directories were not interleaved in time, so drift of the machine looks like a change.",
            "Measure both sides in one experiment.",
        ),
        "unpaired": _warning(
            "The directories share no blocks; intervals are unpaired and wider.",
            "Measure both sides in one experiment.",
        ),
        "same-runs": _note("Both sides are the same runs.", "Name two different variants or directories."),
        "unmatched": _warning(
            "An arm has no counterpart on the other side and is not compared.", "Measure it on both sides."
        ),
        "machines-differ": _warning(
            "The two experiments ran on other machines, at other priorities, or with other versions.",
            "Measure both sides on one machine with the same software.",
        ),
        "foreign-results": _warning(
            "Result files of other tools record neither order, configuration nor machine.",
            "Check that only the intended change separates the two sides.",
        ),
        "tools-differ": _warning(
            "Different tools measured the two sides, so part of a difference may be theirs.",
            "Measure both sides with one tool.",
        ),
        "settings-unknown": _warning(
            "Some settings are not recorded on both sides and are not compared.", "Check them yourself."
        ),
        "load-unmatched": _warning("Only one side has this load.", "Measure the load on both sides."),
        "definition": _note("Another tool defines a metric differently; the message says how.", _NOTHING),
    },
    IMPORT_REPAIRS: {
        "usage-duplicated": _warning(
            "The usage of a request is repeated for each of its choices; it is counted once.", _NOTHING
        ),
        "log-restarted": _warning(
            "The step log holds several lifetimes of a server; those that produced the answers count.", _NOTHING
        ),
        "line-cut": _warning("A file ends within a line, which is left out.", "Copy the file again."),
        "lines-damaged": _warning("Lines that are not records are left out.", "Copy the file again."),
        "questions-unanswered": _warning("Questions failed or have no line.", "Run the script again."),
        "answers-resumed": _suspect(
            "The client was restarted and reused earlier answers, so wall_s is valid for neither run.",
            "Run the script again from the start.",
        ),
    },
    IMPORT_LIMITS: {
        "wall-holds-client": _warning(
            "wall_clock_s of the source includes the client's start; wall_s here does not.", _NOTHING
        ),
        "value-model-load-measured": _warning(
            "The value model was loaded within the measured load.", "Warm the server up with a guided request."
        ),
        "greedy-records": _warning(
            "Greedy steps count as steps here; the project's own columns leave them out.", _NOTHING
        ),
        "sampling-unrecorded": _warning(
            "Sampling parameters are recorded nowhere; defaults replace them.", "Keep the command line."
        ),
        "sections-async": _warning(
            "Sections are host time; the first blocking call is charged for all queued GPU work.", _NOTHING
        ),
        "steps-are-samplers": _warning(
            "The step log times the sampler alone, so step_ms is unknown.", "Compare wall_s instead."
        ),
        "steps-unrecorded": _warning("The source has no step log.", "Compare wall_s instead."),
        "averages-cumulative": _warning(
            "The server printed averages since its start and synchronized the device around each section.", _NOTHING
        ),
        "overlap-differs": _warning(
            "The project's scripts disable overlapped scheduling on guided servers only, which adds to the "
            "difference.",
            "Measure the flags apart, with controls in a profile of benchctl.",
        ),
        "sends-reconstructed": _warning(
            "Send times are reconstructed from latencies and concurrency, with retries included.", _NOTHING
        ),
        "models-assumed": _warning(
            "No file names the models, so FLOPs are those of assumed ones.", "Name them: --model, --value-model."
        ),
        "gpu-unattributed": _warning(
            "GPU samples cover every device of the host, not only those of the server.", _NOTHING
        ),
    },
}
"""Warning codes by topic and code; the order is that of the reference."""

CHECKS: Final[dict[str, str]] = {
    "requests": "Requests sent equal those completed plus those failed, and each prepared request has one record.",
    "client-tokens": "The tokens that the client received equal usage, request by request.",
    "step-tokens": "The output tokens of all steps equal usage.",
    "counters": "The growth of the server's token counter equals usage.",
    "prefix-cache": "No prompt token came from a prefix cache, unless the profile allows it.",
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
    "speculation-never-drafted": "A server that is configured to draft tokens never did.",
    "speculation-cannot-win": "A sequence gains no more than one token per step from its drafts.",
    "unexplained-by-flops": "More FLOPs explain only a part of a slowdown.",
    "noisy-baseline": "The baseline scatters more than the other cells, so a ratio to a single run misleads.",
    "lazy-load-in-warmup": "The value model was loaded during the warm-up.",
    "lazy-load-measured": "The value model was loaded during the measured load, whose times include it.",
}
"""Findings by code: conclusions that the numbers support, in the findings list of a report."""
