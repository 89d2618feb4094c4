"""FLOPs of measured runs: published and observed accounts from directories with a known truth, and what leads from
one to the other; drafts too, of which the options of a server say what made them.
"""

import json
from dataclasses import replace

import msgspec
import pytest
from support.results.builders import prepared, write_results
from support.results.drafted import NUM_SEQS, write_drafted
from support.steps import records_of, with_steps

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.attribution.flops import count_run_flops
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.summary import flops_bridge
from benchctl.analysis.metrics.speculation import Drafter, drafter_of
from benchctl.costs.flops import observed_flops, published_flops
from benchctl.costs.run_work import Lengths, RunTotals, StepLogCounts
from benchctl.costs.shapes import shape_for
from benchctl.engines.sim.options import SimOptions
from benchctl.engines.vllm_options import VllmOptions
from benchctl.profile.engine_options import ServerOptions
from benchctl.records.loaded import load_results
from benchctl.records.record import RequestError
from benchctl.report.documents import summary_document

BASE, VALUE = shape_for("qwen2.5-7b"), shape_for("qwen2.5-1.5b")

# write_results: 4 requests with 2 choices of 8 tokens and prompts of 20, prefilled sample by sample.
TOTALS = RunTotals(num_questions=4, num_sequences=8, prompt_tokens=80, output_tokens=64)
SEQUENCES = (Lengths(20, 8),) * 8
PREFILLED = StepLogCounts(base_prefill_tokens=160)


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory):
    loaded = load_results(write_results(tmp_path_factory.mktemp("flops")).path)
    return {run.record.variant: run for run in loaded.runs[:2]}


def account(run, **changes):
    value_model = VALUE if run.record.variant == "guided" else None
    options = {"base": BASE, "value_model": value_model, "top_k": 5, "prepared": prepared(4, 8, 2)}
    return count_run_flops(run, **options | changes)


def steps_with(run, **fields):
    return with_steps(run, [msgspec.structs.replace(step, **fields) for step in records_of(run)])


def requests_with(run, *indices, **fields):
    """Replace fields of the requests at ``indices``, or of all."""
    changed = [
        msgspec.structs.replace(request, **fields) if request.index in (indices or range(4)) else request
        for request in run.requests
    ]
    return replace(run, requests=tuple(changed))


def codes(account):
    return [warning.code for warning in account.warnings]


def test_runs_are_accounted_from_usage_and_steps(runs):
    plain = account(runs["baseline"])
    assert plain.published == published_flops(TOTALS, base=BASE)
    assert plain.observed == observed_flops(SEQUENCES, PREFILLED, base=BASE)
    guided = account(runs["guided"])
    assert guided.published == published_flops(TOTALS, base=BASE, value_model=VALUE, top_k=5)
    seen = replace(PREFILLED, value_prefill_tokens=160, value_extend_tokens=7 * 8, candidates=8 * 3 * 8)
    assert guided.observed == observed_flops(SEQUENCES, seen, base=BASE, value_model=VALUE)
    for each in (plain, guided):
        total = sum(correction.flops for correction in each.corrections)
        assert each.published.total + total == each.observed.total
        assert each.warnings == ()


def test_a_greedy_run_and_one_that_was_never_guided_are_charged_by_the_published_rule_only(runs):
    of_value = dict.fromkeys(("guided_rows", "candidates", "value_prefill_tokens", "value_extend_tokens"))
    greedy = account(steps_with(runs["guided"], is_greedy=True, **of_value), top_k=1)
    for each in (greedy, account(runs["baseline"], value_model=VALUE)):
        assert each.published.of("value").total > 0
        assert each.observed.of("value").total == 0
        assert each.warnings == ()


def test_unknown_candidates_leave_no_observed_account(runs):
    silent = account(steps_with(runs["guided"], candidates=None))
    assert silent.published is not None
    assert (silent.observed, silent.corrections, codes(silent)) == (None, (), ["candidates-unknown"])
    assert silent.warnings[0].where == runs["guided"].record.run_id
    assert account(with_steps(runs["guided"], ())).observed is None


def test_what_the_log_does_not_count_is_assumed_and_said(runs):
    # The same as logged: a prompt and all but the last token of each sequence.
    silent = account(steps_with(runs["guided"], value_prefill_tokens=None, value_extend_tokens=None))
    assert codes(silent) == ["value-prefixes-assumed"]
    assert silent.observed == account(runs["guided"]).observed
    one_prompt = account(steps_with(runs["baseline"], num_prefill_tokens=None))
    assert codes(one_prompt) == ["base-prefill-assumed"]
    assert one_prompt.observed == observed_flops(SEQUENCES, StepLogCounts(base_prefill_tokens=80), base=BASE)
    assert codes(account(steps_with(runs["baseline"], draft_tokens=3))) == ["drafts-not-charged"]


def test_warm_up_counts_for_nothing_and_failed_requests_are_left_out_and_named(runs):
    run = runs["guided"]
    warm_request = msgspec.structs.replace(run.requests[0], request_id="warm", is_warmup=True)
    warm_step = msgspec.structs.replace(records_of(run)[0], is_warmup=True, candidates=10**9)
    warmed = replace(with_steps(run, (warm_step, *records_of(run))), requests=(warm_request, *run.requests))
    assert account(warmed) == account(run)
    failed = account(requests_with(runs["baseline"], 0, error=RequestError(kind="timeout", message="no answer")))
    assert failed.published.output_tokens == 48
    assert codes(failed) == ["failed-requests-in-step-log"]
    assert "1 of 4 requests did not complete" in failed.warnings[0].message


def test_tokens_are_those_of_usage_or_of_choices_or_of_the_workload(runs):
    run, whole = runs["baseline"], account(runs["baseline"])
    uncounted = tuple(
        msgspec.structs.replace(choice, output_tokens=None, chunk_tokens=None) for choice in run.requests[0].choices
    )
    once = account(requests_with(run, choices=uncounted, completion_tokens=15))
    assert (once.published.output_tokens, codes(once)) == (60, ["choice-lengths-assumed"])
    assert once.observed == observed_flops((Lengths(20, 8), Lengths(20, 7)) * 4, PREFILLED, base=BASE)
    assert account(requests_with(run, completion_tokens=None)).observed == whole.observed
    bare = account(requests_with(run, choices=()))
    assert bare.warnings == ()
    assert bare.observed == observed_flops((Lengths(20, 16),) * 4, PREFILLED, base=BASE)
    silent = requests_with(run, prompt_tokens=None)
    assert account(silent).published == whole.published
    assert codes(account(silent)) == ["prompt-tokens-estimated"]
    unknown = account(silent, prepared=())
    assert "r00000" in unknown.warnings[0].message
    for each, code in (
        (unknown, "tokens-unknown"),
        (account(requests_with(run, completion_tokens=None, choices=())), "tokens-unknown"),
        (account(replace(run, requests=())), "no-completed-requests"),
    ):
        assert (each.published, each.observed, codes(each)) == (None, None, [code])


@pytest.mark.parametrize(
    ("sources", "samples", "num_questions"),
    [
        ("aabb", (0, 1, 0, 1), 2),
        ("abab", (0, 0, 1, 1), 2),
        ("aaaa", (0, 1, 2, 3), 1),
        ("aaaa", (0, 1, 0, 1), 2),
        ("aaaa", (0, 0, 0, 0), 4),
    ],
)
def test_samples_sent_as_requests_share_the_prompt_of_their_question(runs, sources, samples, num_questions):
    requests = tuple(
        msgspec.structs.replace(request, source=source, sample=sample)
        for request, source, sample in zip(prepared(4, 8, 2), sources, samples, strict=True)
    )
    shared = account(runs["baseline"], prepared=requests)
    totals = RunTotals(
        num_questions=num_questions, num_sequences=8, prompt_tokens=20 * num_questions, output_tokens=64
    )
    assert shared.published == published_flops(totals, base=BASE)
    assert shared.observed == account(runs["baseline"]).observed


def test_corrections_lead_from_the_published_to_the_observed_total_of_every_cell(tmp_path):
    path = write_results(tmp_path / "r", cells=[{"top_k": 1}, {"top_k": 5}]).path
    analysis = analyze_directory(path)
    bridges = {cell.label: flops_bridge(cell) for cell in analysis.cells}
    assert list(bridges) == ["baseline", "guided top_k=1", "guided top_k=5"]
    for bridge in bridges.values():
        total = bridge["published_flops"] + sum(step["flops"] for step in bridge["steps"])
        assert total == pytest.approx(bridge["observed_flops"], rel=1e-12)
    plain, greedy, guided = bridges.values()
    peak = analysis.experiment.hardware.peak_flops_per_s
    shares = [plain["observed_flops"] / run.number("wall_s") / peak for run in analysis.cells[0].runs]
    assert plain["utilization_frac"] == pytest.approx(sum(shares) / len(shares))
    prices = {step["code"]: step["flops"] for step in greedy["steps"]}
    assert max(prices[code] for code in ("candidates", "value-extend", "value-prefill")) < 0, "it never ran"
    assert guided["observed_flops"] > greedy["observed_flops"]
    results = write_results(tmp_path / "silent")
    for run in results.runs():
        run.step_log.unlink()
    analysis = analyze_directory(results.path)
    assert [flops_bridge(cell) is None for cell in analysis.cells] == [False, True]
    assert [cell["flops_bridge"] is None for cell in summary_document(analysis)["cells"]] == [False, True]


DRAFT = shape_for("llama-68m")
ACCEPTED = (3, 1, 3, 0)
DRAFTED = (Lengths(20, 1 + sum(ACCEPTED) + len(ACCEPTED)),) * NUM_SEQS
VERIFIED = replace(PREFILLED, verification_tokens=len(ACCEPTED) * 4 * NUM_SEQS)
PASSES = replace(
    VERIFIED,
    draft_prefill_tokens=20 * NUM_SEQS,
    draft_tokens=len(ACCEPTED) * 3 * NUM_SEQS,
    backfill_tokens=2 * NUM_SEQS,
)


@pytest.fixture(name="drafting", scope="module")
def _drafting(tmp_path_factory):
    return write_drafted(tmp_path_factory.mktemp("drafts") / "r", [ACCEPTED])


@pytest.fixture(name="run")
def _run(drafting):
    return next(run for run in load_results(drafting.path).runs if run.record.variant == "guided")


def count(run, drafter):
    return count_run_flops(run, base=BASE, value_model=None, top_k=0, prepared=(), drafter=drafter)


def test_verification_and_the_passes_of_a_known_draft_model_are_charged(run):
    whole = count(run, Drafter(shape=DRAFT))
    assert whole.observed == observed_flops(DRAFTED, PASSES, base=BASE, draft_model=DRAFT)
    assert whole.published.total + sum(step.flops for step in whole.corrections) == whole.observed.total
    assert whole.warnings == ()
    counts = replace(PASSES, backfill_tokens=0)
    without_backfill = count(run, Drafter(shape=DRAFT, has_backfill=False))
    assert without_backfill.observed == observed_flops(DRAFTED, counts, base=BASE, draft_model=DRAFT)
    # No draft reaches beyond the end of its output, so the server's counters say what its steps do.
    silent = steps_with(run, draft_tokens=None, drafts=None)
    assert count(silent, Drafter(shape=DRAFT)).observed == whole.observed
    nothing = replace(silent, prometheus=())
    for drafter, told in (
        (Drafter(shape=DRAFT), ["drafts-not-charged"]),
        (Drafter(problem="unknown", is_in_use=False), []),
        (None, []),
    ):
        assert codes(count(nothing, drafter)) == told


@pytest.mark.parametrize(
    ("drafter", "code"),
    [
        (Drafter(), "drafts-without-model"),
        (Drafter(problem="unknown model 'nobody/knows'"), "drafts-not-charged"),
        (None, "drafts-not-charged"),
    ],
)
def test_verification_is_charged_without_a_known_model_and_the_result_says_what_drafted(run, drafter, code):
    charged = count(run, drafter)
    assert charged.observed == observed_flops(DRAFTED, VERIFIED, base=BASE)
    assert codes(charged) == [code]
    assert charged.charges_drafts == (code == "drafts-without-model")


def test_the_draft_model_of_a_profile_is_charged_in_its_results_and_a_draft_cost_names_none(drafting):
    def of_variants():
        experiment = load_experiment(drafting.path)
        return {run.record.variant: experiment.flops(run) for run in experiment.results.runs}

    of_cost = of_variants()
    assert (codes(of_cost["baseline"]), codes(of_cost["guided"])) == ([], ["drafts-not-charged"])
    assert "draft_cost states the time of its passes alone" in of_cost["guided"].warnings[0].message
    profile = drafting.profile_yaml()
    drafting.write_profile(profile.replace("draft_cost: 0.05", "draft_model: llama-68m, backfill: prefill"))
    of_model = of_variants()
    drafting.write_profile(profile)
    assert of_model["guided"].observed == observed_flops(DRAFTED, PASSES, base=BASE, draft_model=DRAFT)
    assert of_model["baseline"].observed == observed_flops(DRAFTED, PREFILLED, base=BASE)
    assert of_model["guided"].warnings == ()


SIM = {"num_speculative_tokens": 3, "acceptance": 0.8, "cost_model": "roofline", "draft_model": "llama-68m"}
ALONE = Drafter(shape=DRAFT, has_backfill=False)


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        (SimOptions(), None),
        (SimOptions(**SIM), ALONE),
        (SimOptions(**SIM, backfill="expansion"), Drafter(shape=DRAFT)),
        (SimOptions(**SIM, backfill="expansion", bonus_token=False), ALONE),
        (VllmOptions(), None),
        (VllmOptions(num_speculative_tokens=2, draft_model="JackFram/llama-68m"), Drafter(shape=DRAFT)),
        (VllmOptions(num_speculative_tokens=2, speculative_method="ngram"), Drafter()),
        (VllmOptions(speculative_config={"method": "ngram", "num_speculative_tokens": 2}), Drafter()),
        (
            VllmOptions(speculative_config={"method": "draft_model", "model": "llama-68m"}),
            Drafter(shape=DRAFT),
        ),
        (
            VllmOptions(num_speculative_tokens=2, speculative_method="eagle", draft_model="d"),
            Drafter(problem="eagle names no model of its own"),
        ),
        (ServerOptions(), Drafter(problem="the options do not say what drafts", is_in_use=False)),
    ],
)
def test_what_drafts_follows_from_the_options(options, drafter):
    assert drafter_of(options) == drafter


def test_a_directory_with_a_config_is_a_known_draft_model_and_one_of_the_hub_that_is_not_here_unknown(tmp_path):
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, **sizes}))
    assert drafter_of(VllmOptions(num_speculative_tokens=2, draft_model=str(tmp_path))).shape.layers == 1
    unknown = drafter_of(VllmOptions(num_speculative_tokens=2, draft_model="nobody/knows"))
    assert unknown.shape is None
    assert "unknown model 'nobody/knows'" in unknown.problem
