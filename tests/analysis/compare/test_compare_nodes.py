"""Comparisons of runs that were measured on several nodes: which blocks count, and which may be pooled."""

import msgspec
import pytest
from support.results.builders import edit_manifest, edit_run, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.errors import NotComparableError
from benchctl.records.schema import NodeGpu, NodeInfo

SEVEN = ({"baseline": 1.0, "guided": 1.1},) * 7


def node(name="n1", *gpus, **fields):
    """A node; ``gpus`` are the identities of its devices."""
    devices = tuple(
        NodeGpu(index=i, name="NVIDIA H100", uuid=uuid, driver="570.1", max_sm_clock_mhz=1980, power_limit_w=700.0)
        for i, uuid in enumerate(gpus)
    )
    values = {"cpu_model": "Xeon", "cores": "0-7", "build": {"torch": "2.8.0", "vllm": "0.10.1"}, "gpus": devices}
    return NodeInfo(name=name, hostname=f"{name}.cluster", **values | fields)


def place(results, node_of, *, variants=("baseline", "guided"), **fields):
    """Record the node of each run by its block."""
    for planned in results.plan().runs:
        if planned.variant in variants:
            edit_run(results, planned.run_id, node=node_of(planned.block), **fields)


def within(results, **options):
    sides = (parse_side(f"{results.path}:{variant}") for variant in ("baseline", "guided"))
    return compare_sides(*sides, CompareOptions(**options))


def messages(comparison, code):
    return [warning.message for warning in comparison.warnings if warning.code == code]


def undeclared(comparison):
    """The keys of the differences that were allowed and are not declared by the profile's variants."""
    return [difference.key for difference in comparison.allowed if not difference.is_declared]


def differences_of(results, **options):
    with pytest.raises(NotComparableError) as caught:
        within(results, **options)
    return caught.value.differences


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "a", block_factors=SEVEN)


def test_blocks_on_nodes_with_the_same_hardware_are_pooled_as_those_of_one_machine(results):
    on_one = within(results)
    place(results, lambda block: node(f"n{block % 3}", f"GPU-{block % 3}a", job=f"slurm 17_{block}"))
    on_several = within(results)
    assert on_several.cells == on_one.cells
    assert undeclared(on_several) == []
    assert messages(on_several, "block-on-several-nodes") == []


def test_a_block_of_which_the_arms_met_different_nodes_is_left_out_and_named(results):
    place(results, lambda block: node("n1"))
    place(results, lambda block: node("n2" if block == 3 else "n1"), variants=("guided",))
    compared = within(results)
    assert [cell.num_blocks for cell in compared.cells] == [6]
    (message,) = messages(compared, "block-on-several-nodes")
    assert message == (
        "block 3 is left out: its runs were measured on several nodes: n1 (006-b3-baseline) and n2 "
        "(007-b3-guided-top_k5)"
    )
    assert messages(compared, "excluded-block") == []


def test_a_block_on_several_devices_of_one_node_is_left_out_too(results):
    place(results, lambda block: node("n1", "GPU-a"))
    place(results, lambda block: node("n1", "GPU-b" if block == 0 else "GPU-a"), variants=("guided",))
    compared = within(results)
    assert [cell.num_blocks for cell in compared.cells] == [6]
    (message,) = messages(compared, "block-on-several-nodes")
    assert "on several devices: n1 with GPU-a (000-b0-baseline) and n1 with GPU-b" in message


def test_no_table_counts_a_block_that_the_comparison_leaves_out(results):
    place(results, lambda block: node("n1"))
    place(results, lambda block: node("n2" if block == 3 else "n1"), variants=("guided",))
    analysis = analyze_directory(results.path)
    assert [len(cell.runs) for cell in analysis.cells] == [6, 6]
    assert [w.message[:7] for w in analysis.warnings if w.code == "block-on-several-nodes"] == ["block 3"]
    assert within(results, allow_suspect=True).cells[0].num_blocks == 6


def test_a_run_that_does_not_count_scatters_no_block(results):
    place(results, lambda block: node("n1"))
    edit_run(results, "006-b3-baseline", node=node("n2"), state="running")
    compared = within(results)
    assert messages(compared, "block-on-several-nodes") == []
    (message,) = messages(compared, "excluded-block")
    assert message.startswith("block 3 is left out: 006-b3-baseline: failed (interrupted)")


def test_arms_whose_profile_chooses_their_devices_may_have_other_ones_on_one_node(results):
    profile = results.path / "profile.yaml"
    own = """
engine: {kind: vllm}
model: qwen2.5-7b
workload: {dataset: generated, num_prompts: 4, arrival: {kind: closed-loop, max_concurrency: 4}}
variants:
  baseline: {server: {env: {CUDA_VISIBLE_DEVICES: "0"}}}
  guided: {server: {env: {CUDA_VISIBLE_DEVICES: "0,1"}, tensor_parallel_size: 2}}
sweep: {top_k: [5]}
allowed_differences: [server.value_model]
"""
    profile.write_text("name: built\nseed: 7\n" + own)
    place(results, lambda block: node("n1", "GPU-a"))
    place(results, lambda block: node("n1", "GPU-a", "GPU-b"), variants=("guided",))
    assert within(results).cells[0].num_blocks == 7
    place(results, lambda block: node("n2", "GPU-a", "GPU-b"), variants=("guided",))
    codes = [warning.code for warning in load_experiment(results.path).block_warnings]
    assert codes.count("block-on-several-nodes") == 7


def test_a_simulator_with_its_own_clock_may_run_anywhere(results):
    for variant in ("baseline", "guided"):
        place(
            results, lambda block, v=variant: node(f"{v}-{block}", cpu_model=f"CPU {block}"), variants=(variant,),
            clock="virtual",
        )  # fmt: skip
    compared = within(results)
    assert [cell.num_blocks for cell in compared.cells] == [7]
    assert undeclared(compared) == []


@pytest.mark.parametrize(
    ("changed", "first", "second"),
    [
        ({"cpu_model": "EPYC"}, "processor Xeon", "processor EPYC"),
        ({"gpus": ()}, "1 x NVIDIA H100", "no visible GPU"),
        ({"build": {"torch": "2.7.0", "vllm": "0.10.1"}}, "torch 2.8.0", "torch 2.7.0"),
        ({"build": {"torch": "2.8.0"}}, "vllm 0.10.1", "vllm absent"),
    ],
)
def test_blocks_on_other_hardware_are_refused_with_what_each_ran_on(results, changed, first, second):
    place(results, lambda block: node("n2", "GPU-b", **changed) if block > 4 else node("n1", "GPU-a"))
    (difference,) = differences_of(results)
    before, after = difference.removeprefix("hardware: ").split(" against ")
    assert before.startswith(first)
    assert before.endswith("(blocks 0, 1, 2, 3, 4 on n1)")
    assert after.startswith(second)
    assert after.endswith("(blocks 5, 6 on n2)")
    with pytest.raises(NotComparableError, match="--allow-difference hardware"):
        within(results)


def test_driver_clocks_and_power_limit_of_devices_are_hardware(results):
    def weaker(block):
        whole = node("n1", "GPU-a")
        (gpu,) = whole.gpus
        capped = msgspec.structs.replace(gpu, driver="560.2", power_limit_w=500.0)
        return msgspec.structs.replace(whole, gpus=(capped,)) if block == 6 else whole

    place(results, weaker)
    (difference,) = differences_of(results)
    assert difference == (
        "hardware: driver 570.1, power limit 700 W (blocks 0, 1, 2, 3, 4, 5 on n1) against driver 560.2, power "
        "limit 500 W (block 6 on n1)"
    )


def test_cores_are_the_hardware_of_servers_without_devices_and_only_of_these(results):
    place(results, lambda block: node("n1", "GPU-a", cores="0-3" if block > 3 else "4-11"))
    assert within(results).cells[0].num_blocks == 7
    place(results, lambda block: node("n1", cores="0-7" if block > 3 else "8-15"))
    assert within(results).cells[0].num_blocks == 7
    place(results, lambda block: node("n1", cores="0-3" if block > 3 else "4-11"))
    assert differences_of(results) == (
        "hardware: cores 8 (blocks 0, 1, 2, 3 on n1) against cores 4 (blocks 4, 5, 6 on n1)",
    )


def test_builds_that_differ_between_the_arms_alone_are_no_hardware(results):
    place(results, lambda block: node("n1"))
    place(results, lambda block: node("n1", build={"torch": "2.9.0"}), variants=("guided",))
    assert within(results).cells[0].num_blocks == 7


@pytest.mark.parametrize("allowed", ["hardware", "host", "h*"])
def test_hardware_that_is_allowed_is_pooled_and_listed(results, allowed):
    place(results, lambda block: node("n2", cpu_model="EPYC") if block > 4 else node("n1"))
    compared = within(results, allow=(allowed,))
    assert [cell.num_blocks for cell in compared.cells] == [7]
    assert undeclared(compared) == ["hardware"]


def test_a_profile_may_allow_other_hardware(results):
    place(results, lambda block: node("n2", cpu_model="EPYC") if block > 4 else node("n1"))
    profile = results.path / "profile.yaml"
    text = profile.read_text()
    profile.write_text(text.replace("allowed_differences: [", "allowed_differences: [hardware, "))
    assert undeclared(within(results)) == ["hardware"]


def test_older_runs_without_a_node_are_held_to_one_host_as_before(results):
    for planned in results.plan().runs:
        edit_run(results, planned.run_id, host="two" if planned.block > 4 else "one")
    assert differences_of(results) == ('host: "one" or "two" against "one" or "two"',)


def test_devices_that_a_scheduler_chose_are_no_difference_of_the_servers(results):
    for planned in results.plan().runs:
        of_block = f"{planned.block}"
        edit_run(
            results, planned.run_id, node=node("n1", of_block, cores=f"{planned.block}-{planned.block + 7}"),
            env={"CUDA_VISIBLE_DEVICES": of_block, "NVIDIA_VISIBLE_DEVICES": of_block, "OMP_NUM_THREADS": "4"},
            effective_config=results.run(planned.run_id).read().effective_config
            | {"server.client_cores": f"client on {of_block}, server on {planned.block + 1}-{planned.block + 7}"},
        )  # fmt: skip
    assert undeclared(within(results)) == []
    edit_run(results, "000-b0-baseline", env={"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "8"})
    assert differences_of(results) == ('env.OMP_NUM_THREADS: "8" or "4" against "4"',)


def test_paths_on_several_hosts_are_compared_by_their_last_part(results):
    place(results, lambda block: node(f"n{block}"))
    for planned in results.plan().runs:
        edit_run(results, planned.run_id, argv=(f"/scratch/n{planned.block}/bin/python", "-m", "vllm"))
    assert undeclared(within(results)) == []
    place(results, lambda block: node("n1"))
    assert any(difference.startswith("argv.program") for difference in differences_of(results))


def test_two_directories_of_one_hardware_each_are_compared_with_a_warning(results, tmp_path):
    other = write_results(tmp_path / "b", block_factors=SEVEN)
    edit_manifest(other, created_at="2026-02-01T00:00:00Z")
    place(results, lambda block: node(f"n{block % 2}", f"GPU-{block % 2}"))
    place(other, lambda block: node("n9", "GPU-9", "GPU-8", cpu_model="EPYC", build={"torch": "2.9.0"}))
    compared = compare_sides(parse_side(str(results.path)), parse_side(str(other.path)), CompareOptions())
    assert undeclared(compared) == []
    place(other, lambda block: node("n9", "GPU-9", cpu_model="EPYC" if block else "Xeon"))
    with pytest.raises(NotComparableError, match=r"hardware: .* against processor EPYC .* or processor Xeon"):
        compare_sides(parse_side(str(results.path)), parse_side(str(other.path)), CompareOptions())


def test_what_a_stranger_calls_a_node_begins_no_line_of_a_refusal(results):
    place(results, lambda block: node("n1\n  seed: 7 against 8", cpu_model=f"\x1b[2J{block > 3}\n"))
    (difference,) = differences_of(results)
    assert "\n" not in difference
    assert "\x1b" not in difference
    place(results, lambda block: node("n2\nand more"), variants=("guided",))
    warnings = load_experiment(results.path).block_warnings
    assert [warning.code for warning in warnings].count("block-on-several-nodes") == 7
    assert not any("\n" in warning.message for warning in warnings)
