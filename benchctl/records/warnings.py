"""Warning codes of what a run, its server and its machine show; ``warning_codes`` has all others.

Each says about the numbers what they suffer from, and what to do about it. A new warning is one entry here or there
and one emission elsewhere; ``docs/reference/warnings.md`` is generated from the table, and a test holds it against
the code in both directions.
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


suspect: Final = partial(WarningCode, "suspect")
_client_suspect: Final = partial(suspect, limits_client_times=True)
_load_suspect: Final = partial(_client_suspect, has_lighter_load=True)
warning: Final = partial(WarningCode, "warning")
note: Final = partial(WarningCode, "note")

MEASURE_AGAIN: Final = "Measure again with 'benchctl run --resume'."
_FREE_CORE: Final = "Free a processor core for the client, or lower the load."
NOTHING: Final = "Nothing; keep it in mind."
RESTORE: Final = "Restore the file from a copy, or measure again; 'benchctl verify' lists every alteration."
MEASURE_NOISE: Final = "Measure it again with 'benchctl run NAME --aa'."

RUN_WARNINGS: Final[dict[str, dict[str, WarningCode]]] = {
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
        "sends-unlike-poisson": warning(
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
        "times-bounded": warning(
            "Some arrivals are known between bounds only; the metrics named in the message are left out.",
            "Free a processor core for the client, and measure again.",
        ),
        "event-loop-stalls": warning(
            "The client's event loop repeatedly stalled for over 100 ms; refills and timeout checks may have been "
            "late.",
            _FREE_CORE,
        ),
        "client-crowded": note(
            "The load generator had more processes than cores, so the client's times are less exact.",
            "Lower load.workers, or give the client more cores.",
        ),
        "rate-capped": warning(
            "A cap of the profile held planned requests back; that wait is in no latency (coordinated omission).",
            "Raise max_concurrency or launch_rate_limit, or use a closed loop.",
        ),
        "wall-clock-set": warning(
            "The system clock was set during the load, so the client's own timestamps replace the kernel's.",
            "Keep the clock of the measuring machine steady during a run.",
        ),
        "other-transport": warning(
            "Requests used the fallback transport (TLS), which costs the client more.",
            "Name the final address of the server, without TLS on a network that you trust.",
        ),
        "client-bunching": warning(
            "Tokens reached the client in bursts; ttft, itl and tpot are not trustworthy and decide nothing.",
            "Free processor cores for the client and for the server's front end, then measure again.",
        ),
        "server-coalescing": note(
            "The server regularly writes several chunks at once; itl is the time between those writes.", NOTHING
        ),
        "underfilled-batch": warning(
            "Requests spent much of their time outside the engine's steps, so the batch was smaller than the load.",
            "Lower the load below max_num_seqs, or free processor cores for the server's front end.",
        ),
    },
    "A run": {
        "failed-requests": suspect(
            "Some requests failed; they stay in every denominator and make a comparison incomplete.",
            "Read their errors in requests.jsonl and the server's log, then measure again.",
        ),
        "load-left-out": warning(
            "Of several loads of a server, some failed, are suspect or were not measured; the others count.",
            "Read the message; to have all loads, measure the run again.",
        ),
        "below-floor": suspect(
            "A forward pass took less time than its FLOPs and bytes allow: something else was timed. The run is a "
            "failed one and counts nowhere.",
            "Read the message; name the device's own hardware, and measure again.",
        ),
        "not-steady": warning(
            "Step or token times drifted by 0.75 % or more over the steady window of a load (first-token times by "
            "20 %) beyond what batches and lengths explain, or a load began with slow steps: it was not warm.",
            "Raise num_warmups, measure longer loads, look for clocks, heat and memory; the message says where.",
        ),
        "backlog-grows": warning(
            "More requests arrived than the server answered, so that ever more were open: it was overloaded.",
            "Lower workload.arrival.request_rate; latencies of this load depend on its length.",
        ),
        "replays-allocate": warning(
            "A device handed out memory while forward passes were timed: some of them waited for it.",
            "Measure with more warm-up passes (engine.options.warmups), or a smaller pass.",
        ),
        "warmup-failed": suspect(
            "Requests of the warm-up failed, so the load may have met a cold server.",
            "Read the server's log, then measure again.",
        ),
        "warmup-unsteady": warning(
            "The bound of the warm-up was reached before two waves in a row took the same time per token.",
            "Free the machine, or raise workload.max_warmup_waves or workload.warmup_tolerance.",
        ),
        "shape-met-first": warning(
            "The server met a shape for the first time inside a load: its log says so, or such a step took over "
            "three times as long as expected. Requests waited for work that is done once.",
            "Read the message; raise workload.num_warmups, and leave workload.warmup_shapes on.",
        ),
        "check-failed": suspect(
            "Two independent records of the run contradict each other, so its numbers are invalid.",
            "Read the message: it names the reconciliation check (see below) and both values.",
        ),
        "finish-reason-unknown": suspect(
            "Answers ended with a finish_reason that no engine is known to use, so they may be no answers.",
            "Ask the server's owner what the word means; --allow-suspect counts the answers as they are.",
        ),
        "output-ended-early": suspect(
            "Answers of a forced length ended early although usage counts all their tokens: the server did less "
            "work than was asked for.",
            "Set dialect to the server's own, so that it understands ignore_eos, and measure again.",
        ),
        "output-tokens-unseen": note(
            "Far fewer chunks came than usage counts tokens, and the server does not count the tokens of a chunk.",
            "Name the server's own dialect where it counts tokens; speculation and coalescing look the same.",
        ),
        "prompt-tokens-differ": suspect(
            "The server counted other prompt lengths than were asked for or counted beforehand, or two servers "
            "count the same prompts differently.",
            "Count and write prompts with the model's own tokenizer (workload.tokenizer), and measure again.",
        ),
        "prompt-tokens-unconfirmed": note(
            "Planned prompt lengths were estimated and the server counts others, or no usage says what it counted.",
            "Name the model's tokenizer in workload.tokenizer if predictions are to use these lengths.",
        ),
        "steps-damaged": suspect(
            "The engine's step log cannot be read to its end.",
            "Keep the log (steps.raw.*), report it with the engine's version, and measure again.",
        ),
        "steps-missing": suspect(
            "The engine's step log holds no steps, so the time per step is unknown.",
            "Check that the engine's version supports the step log ('benchctl doctor').",
        ),
        "value-passes-recorded-late": suspect(
            "Steps of the load recorded passes of the value model, of sizes that were not recorded before it.",
            "Raise max_num_seqs, for which passes are recorded, or workload.num_warmups.",
        ),
        "value-kernels-missing": note(
            "A server with a GPU computed its value model by torch alone, because kernels cannot run there or give "
            "other values.",
            "Read the reason; a comparison needs both sides alike, as with value_kernels: false.",
        ),
        "simulated": note(
            "The runs were simulated in virtual time, without server, client or network; times are a cost model's.",
            "Nothing; measure with 'benchctl run' what a decision rests on.",
        ),
        "measured-elsewhere": note(
            "The directory was created on a machine that does not measure, such as a login node.",
            "Nothing; devices and drivers are in the record of each run.",
        ),
        "damaged-line": warning(
            "A file of the run contains a line that cannot be read; what precedes it is kept.",
            "Restore the file from a copy, or measure again.",
        ),
        "configuration-unknown": warning(
            "The server did not report its configuration, so nothing proves that only the declared factor differs.",
            "Use an engine that reports its configuration, or check the command lines yourself.",
        ),
        "repeated-run": note("The run needed more than one attempt.", NOTHING),
        "profile-unreadable": warning(
            "The stored profile cannot be read, so settings and FLOPs of the runs are unknown.",
            "Restore profile.yaml from a copy.",
        ),
        "dataset-substituted": note(
            "The dataset is not on this machine; generated word problems replace it.",
            "Get it with 'benchctl data fetch', or name a file in workload.path.",
        ),
        "prompt-lengths-estimated": note(
            "No tokenizer counted the prompts before the load; their planned lengths are an estimate.",
            "Name a tokenizer in workload.tokenizer; 'usage' has the server's own counts.",
        ),
        "natural-lengths-cut": warning(
            "Some natural lengths are those of answers that max_tokens cut.",
            "Raise workload.max_tokens where the natural lengths are measured.",
        ),
    },
    "The server": {
        "server-survivor": warning(
            "A process of the server survived SIGKILL and shares the machine with the next runs.",
            "End the process, then measure the following runs again.",
        ),
        "server-log-incomplete": warning(
            "The server's log could not be written, or not to its end.",
            "Free disk space, or correct the permissions of the result directory.",
        ),
        "raw-log-kept": warning(
            "The run keeps the server's log with its secrets, because of --keep-raw-logs.",
            "Delete server.raw.log before you share the directory.",
        ),
        "secrets-redacted": note(
            "Secrets in what servers wrote were replaced by marks such as [redacted: HF_TOKEN].", NOTHING
        ),
        "port-held": warning(
            "The server's port was still in use after the server was stopped.", "Find and end its owner."
        ),
        "prefix-cache": warning(
            "Prompt tokens came from the server's prefix cache, so ttft is that of a warm cache.",
            "Choose another --seed, or switch the prefix cache off.",
        ),
        "prefix-hits-differ": warning(
            "Servers of others found unequal shares of the prompts in their prefix caches.",
            "Leave engine.options.bypass_prefix_cache on, or warm both caches with one run each and measure again.",
        ),
        "sim-lag": warning(
            "The simulator fell behind its own clock, so the client's times are longer than the simulated ones.",
            "Lower time_scale, or free the machine; steps are exact.",
        ),
        "sim-far-behind": _client_suspect(
            "The simulator stood still or fell behind its own clock by more than 2 % of the load and half "
            "a second: the client's times are not those of the simulated server.",
            "Free the machine, or lower time_scale, and measure again; steps are exact and count.",
        ),
        "sim-schedule-lost": warning(
            "Announced requests did not come, so arrivals and steps depend on the machine's timing.",
            "Free the machine, and measure again.",
        ),
        "request-field-unknown": warning(
            "The server's description of its requests lacks a field of request.extra_body; vLLM ignores such.",
            "Correct its spelling, or drop it; the server's /openapi.json lists the fields of this version.",
        ),
        "request-field-simulated": note(
            "The simulator takes fields of requests that cost time on a real server, and charges nothing for them.",
            "Measure them on a real engine.",
        ),
    },
    "GPU and samplers": {
        "gpu-sampler-missing": note(
            "A GPU may be there, and neither NVML nor nvidia-smi reads one; use, power, clocks and throttling are "
            "unknown.",
            "Install the driver's tools, or check CUDA_VISIBLE_DEVICES ('benchctl doctor').",
        ),
        "gpu-unreadable": warning(
            "A visible GPU cannot be read; the others are sampled, and the GPU metrics of the run are unknown.",
            "Look at 'nvidia-smi -q' and 'dmesg'; reset it, reboot, or leave it out with CUDA_VISIBLE_DEVICES.",
        ),
        "gpu-lost": warning(
            "A GPU stopped answering during the load; its samples end there, and the GPU metrics are unknown.",
            "Look at 'dmesg' for an Xid error of this device, reset it or reboot, and measure again.",
        ),
        "gpu-unknown-name": warning(
            "CUDA_VISIBLE_DEVICES names a device that is not here; what it means is not sampled.",
            "Correct it: 'nvidia-smi -L' lists indices and identities, of MIG devices, too.",
        ),
        "gpu-partitioned": note(
            "The server has a MIG device, a part of a GPU, and samples are of the whole GPU.",
            "Keep the other parts idle, or read no GPU metric of this run.",
        ),
        "gpu-sampler-failed": warning(
            "The GPU sampler stopped early; its samples do not cover the whole load.", MEASURE_AGAIN
        ),
        "host-sampler-failed": warning(
            "The host sampler stopped early; its samples do not cover the whole load.", MEASURE_AGAIN
        ),
        "prometheus-sampler-failed": warning(
            "Sampling the server's counters stopped early; its samples do not cover the whole load.", MEASURE_AGAIN
        ),
        "gpu-memory-held": warning(
            "GPU memory was still in use after the server was stopped, so the next run may have had less of it.",
            "Find its owner with nvidia-smi, and measure again.",
        ),
        "foreign-gpu-process": warning(
            "Another program used a GPU of the run; the gate of the same name excludes such runs.",
            "Keep the GPU to yourself, and measure again.",
        ),
        "gpu-throttled": warning(
            "A GPU slowed itself down during the load; the gate 'throttling' excludes such runs.",
            "Improve cooling or power supply, or lock the clocks below the limit.",
        ),
        "gpu-power-capped": warning(
            "The power limit held the clocks of a GPU down, as is normal on busy devices.",
            "Nothing, as long as both sides run at the same power limit.",
        ),
    },
}
"""Codes of what a run, its server and its machine show, by topic."""
