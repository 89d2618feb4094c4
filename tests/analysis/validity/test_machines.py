"""The machines of an experiment are those that measured its runs; blocks of other hardware are not pooled.

Results by node: a ratio for each node, one F test, and the warning.
"""

import msgspec
import pytest
from scipy import stats
from support.cli import in_process
from support.peaks import gpu_peaks
from support.results.builders import BASELINE, edit_manifest, edit_run, write_results
from support.results.comparing import compare, compare_arms, messages
from support.results.planted import write_on_nodes

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.cells import p_of_equal_nodes
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.planning import noise_of_experiment
from benchctl.analysis.validity.machines import machines_of
from benchctl.errors import NotComparableError
from benchctl.measure.on_file import gpu_names_here
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import write_json_atomic
from benchctl.records.loaded import load_results
from benchctl.records.peaks import PEAKS
from benchctl.records.schema import GpuInfo, NodeGpu, NodeInfo
from benchctl.records.stores import NOISE, MetricNoise, NoiseFloor
from benchctl.report.documents import show_document
from benchctl.report.experiment_tables import headline
from benchctl.report.page.parts import directory_values

SEVEN = ({"baseline": 1.0, "guided": 1.1},) * 7
LOGIN_GPU = GpuInfo(index=0, name="Quadro P400", uuid="GPU-login", memory_bytes=2 << 30, driver="470.1")


def node(name="n1", *gpus, hostname=None, of_gpu=None, **fields):
    """A node; ``gpus`` are the identities of its devices, which are H100s."""
    values = {"driver": "570.1", "memory_bytes": 80 << 30, "max_sm_clock_mhz": 1980, "power_limit_w": 700.0}
    devices = tuple(
        NodeGpu(index=i, name="NVIDIA H100", uuid=uuid, **values | (of_gpu or {})) for i, uuid in enumerate(gpus)
    )
    of_node = {"cpu_model": "Xeon", "cores": "0-15", "platform": "Linux-6", "memory_bytes": 512 << 30}
    build = {"build": {"torch": "2.8.0", "vllm": "0.10.1"}, "gpus": devices}
    return NodeInfo(name=name, hostname=hostname or name, **of_node | build | fields)


def place(results, node_of, variants=("baseline", "guided"), **fields):
    """Record the node of each run by its block."""
    for planned in results.plan().runs:
        if planned.variant in variants:
            edit_run(results, planned.run_id, node=node_of(planned.block), **fields)


def measured_on(path, node_of, **changes):
    """Results that were created on the host ``login`` and measured where ``node_of`` says, by block."""
    results = write_results(path, block_factors=SEVEN)
    host = msgspec.structs.replace(results.manifest().host, hostname="login")
    edit_manifest(results, host=host, gpus=(LOGIN_GPU,), **changes)
    place(results, node_of, engine=changes.get("engine", "sim"))
    return results


def on_two(block, **fields):
    return node(f"n{block % 2}", f"GPU-{block % 2}", **fields)


def machines(results):
    return machines_of(load_results(results.path))


def test_runs_of_nodes_are_not_said_to_be_those_of_the_host_that_created_the_experiment(tmp_path):
    results = measured_on(tmp_path, on_two)
    assert [(m.node, m.num_cores, [gpu.uuid for gpu in m.gpus], m.blocks) for m in machines(results)] == [
        ("n0", 16, ["GPU-0"], (0, 2, 4, 6)),
        ("n1", 16, ["GPU-1"], (1, 3, 5)),
    ]
    analysis = analyze_directory(results.path)
    facts = dict(directory_values(analysis)["facts"])
    assert headline(analysis).endswith("2 nodes (n0, n1), 2 x NVIDIA H100")
    assert (facts["2 nodes"][1], facts["GPUs"][1]) == (
        "n1: Xeon, 16 cores, 512.0 GiB, Linux-6; 3 blocks",
        "n1: NVIDIA H100, 80.0 GiB, driver 570.1, GPU-1",
    )
    assert (facts["created on"].startswith("login, "), "host" in facts) == (True, False)
    assert [machine["node"] for machine in show_document(analysis)["machines"]] == ["n0", "n1"]


def test_a_machine_has_the_devices_of_all_its_blocks_or_what_the_manifest_says(tmp_path):
    def quarter(block):
        return node("n0", f"GPU-{block % 4}", cores=f"{block % 4 * 4}-{block % 4 * 4 + 3}")

    (machine,) = machines(measured_on(tmp_path / "a", quarter))
    assert ([gpu.uuid for gpu in machine.gpus], machine.num_cores) == ([f"GPU-{i}" for i in range(4)], 16)
    older = measured_on(tmp_path / "b", lambda block: None)
    (machine,) = machines(older)
    assert (machine.node, machine.gpus[0].uuid, machine.blocks) == ("login", "GPU-login", ())
    assert headline(analyze_directory(older.path)).endswith("login, Quadro P400")
    for planned in older.plan().runs:  # continued elsewhere
        later = node("n1") if planned.block > 3 else None
        edit_run(older, planned.run_id, node=later, host="login" if later is None else "n1")
    assert [machine.node for machine in machines(older)] == ["login", "n1"]


def test_peaks_and_noise_are_those_of_a_machine_that_measured(tmp_path, monkeypatch):
    results = measured_on(tmp_path / "a", on_two, engine="vllm")
    experiment = load_experiment(results.path)
    assert (experiment.hardware.name, experiment.warnings) == ("h100-sxm", ())
    for host, device, is_used in (("login", "Quadro P400", False), ("n1", "NVIDIA H100", True)):
        write_json_atomic(results.path / PEAKS.file, gpu_peaks(host=host, device=device))
        assert (load_experiment(results.path).hardware.measured_at is not None) is is_used
        noise = NoiseFloor(
            schema_version=3, measured_at="2026-01-01T00:00:00Z", source="aa", host=host, engine="vllm",
            engine_sha256="0", model="qwen2.5-7b", request_set_sha256="0",
            metrics={"step_ms": MetricNoise(log_sd=0.1, num_blocks=8, floor_frac=0.9)},
        )  # fmt: skip
        write_json_atomic(results.path / NOISE.file, noise)
        compared = compare_arms(results)
        assert bool(compared.noise) is is_used
        told = [text.partition(": ")[0] for text in messages(compared, "noise-of-another-machine")]
        words = "the noise floor is that of login, and the runs were measured on 2 nodes (n0, n1), 2 x NVIDIA H100"
        assert told == ([] if is_used else [words])
    head, _, rest = results.profile_yaml().partition("  guided:")
    assert rest
    results.write_profile(head + "  guided: {}\n")
    with pytest.raises(NotComparableError, match=r"2 nodes \(n0, n1\).*one machine"):
        noise_of_experiment(load_experiment(results.path))
    monkeypatch.setattr("platform.node", lambda: "login")
    assert gpu_names_here(measured_on(tmp_path / "c", lambda block: None).manifest()) == ("Quadro P400",)


def test_two_directories_are_held_against_each_other_by_the_machines_that_measured(tmp_path):
    left = measured_on(tmp_path / "a", lambda block: on_two(block, build={"torch": "2.8.0"}))
    right = measured_on(
        tmp_path / "b",
        lambda block: node(f"m{block % 4}", f"GPU-m{block % 4}", build={"torch": "2.9.0"}),
        created_at="2026-02-01T00:00:00Z",
    )
    compared = compare(left.path, right.path)
    assert {w.where: w.message for w in compared.warnings if w.code == "machines-differ"} == {
        "host": "host differs: 2 nodes: n0, n1 (Xeon, 16 cores, Linux-6) against 4 nodes: m0, m1, m2, m3 (Xeon, 16 "
        "cores, Linux-6)",
        "GPUs": "GPUs differs: 2 nodes: 2 x NVIDIA H100 driver 570.1 against 4 nodes: 4 x NVIDIA H100 driver 570.1",
        "engine build": "engine build differs: torch 2.8.0 against torch 2.9.0",
    }
    place(right, lambda block: node("n9", "GPU-9", "GPU-8", cpu_model="EPYC"))
    assert undeclared(compare(left.path, right.path)) == []
    place(right, lambda block: node("n9", "GPU-9", cpu_model="EPYC" if block else "Xeon"))
    with pytest.raises(NotComparableError, match=r"hardware: .* against processor EPYC .* or processor Xeon"):
        compare(left.path, right.path)


def undeclared(comparison):
    """The keys of the differences that were allowed and are not declared by the profile's variants."""
    return [difference.key for difference in comparison.allowed if not difference.is_declared]


def differences_of(results):
    with pytest.raises(NotComparableError) as caught:
        compare_arms(results)
    return caught.value.differences


def codes_of_blocks(results):
    return [warning.code for warning in load_experiment(results.path).block_warnings]


def assert_pooled(results, num_blocks=7, **options):
    compared = compare_arms(results, **options)
    assert [cell.num_blocks for cell in compared.cells] == [num_blocks]
    return compared


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "a", block_factors=SEVEN)


@pytest.mark.parametrize(
    ("of_all", "of_guided", "clock"),
    [
        pytest.param(
            lambda block: node(f"n{block % 3}", f"GPU-{block % 3}", job=f"17_{block}"), None, "host", id="same"
        ),
        pytest.param(
            lambda block: node("n1", "GPU-a", cores="0-3" if block > 3 else "4-11"), None, "host",
            id="cores beside devices",
        ),
        pytest.param(
            lambda block: node("n1", cores="0-7" if block > 3 else "8-15"), None, "host", id="as many cores"
        ),
        pytest.param(
            lambda block: node(), lambda block: node(build={"torch": "2.9.0"}), "host",
            id="builds that differ between the arms alone",
        ),
        pytest.param(
            lambda block: node(f"n{block}", cpu_model=f"CPU {block}"), lambda block: node(f"m{block}"), "virtual",
            id="a simulator with its own clock",
        ),
    ],
)  # fmt: skip
def test_blocks_on_nodes_with_the_same_hardware_are_pooled_as_those_of_one_machine(
    results, of_all, of_guided, clock
):
    on_one = compare_arms(results)
    place(results, of_all, clock=clock)
    place(results, of_guided or of_all, ("guided",), clock=clock)
    on_several = assert_pooled(results)
    assert clock == "virtual" or on_several.cells == on_one.cells
    assert undeclared(on_several) == messages(on_several, "block-on-several-nodes") == []


def test_a_block_of_which_the_arms_met_different_nodes_is_left_out_and_named(results):
    place(results, lambda block: node("n1", "GPU-a"))
    place(
        results, lambda block: node("n2" if block == 3 else "n1", "GPU-b" if block == 0 else "GPU-a"), ("guided",)
    )
    for options in ({}, {"allow_suspect": True}):
        compared = assert_pooled(results, 5, **options)
        assert messages(compared, "excluded-block") == []
        of_devices, of_nodes = sorted(messages(compared, "block-on-several-nodes"))
        assert "on several devices: n1 with GPU-a (000-b0-baseline) and n1 with GPU-b" in of_devices
        assert of_nodes == (
            "block 3 is left out: its runs were measured on several nodes: n1 (006-b3-baseline) and n2 "
            "(007-b3-guided-top_k5)"
        )
    assert [len(cell.runs) for cell in analyze_directory(results.path).cells] == [5, 5]
    place(results, lambda block: node("n1"))
    edit_run(results, "006-b3-baseline", node=node("n2"), state="running")
    compared = compare_arms(results)
    assert messages(compared, "block-on-several-nodes") == []
    (message,) = messages(compared, "excluded-block")
    assert message.startswith("block 3 is left out: 006-b3-baseline: failed (interrupted)")


def test_arms_whose_profile_chooses_their_devices_may_have_other_ones_on_one_node(results):
    results.write_profile("""\
name: built
seed: 7
engine: {kind: vllm}
model: qwen2.5-7b
workload: {dataset: generated, num_prompts: 4, arrival: {kind: closed-loop, max_concurrency: 4}}
variants:
  baseline: {server: {env: {CUDA_VISIBLE_DEVICES: "0"}}}
  guided: {server: {env: {CUDA_VISIBLE_DEVICES: "0,1"}, tensor_parallel_size: 2}}
sweep: {top_k: [5]}
allowed_differences: [server.value_model]
""")
    place(results, lambda block: node("n1", "GPU-a"))
    place(results, lambda block: node("n1", "GPU-a", "GPU-b"), ("guided",))
    assert_pooled(results)
    place(results, lambda block: node("n2", "GPU-a", "GPU-b"), ("guided",))
    assert codes_of_blocks(results).count("block-on-several-nodes") == 7


WITH_GPU = node("n1", "GPU-a")


@pytest.mark.parametrize(
    ("early", "late", "first", "second"),
    [
        (WITH_GPU, node("n2", "GPU-b", cpu_model="EPYC"), "processor Xeon", "processor EPYC"),
        (WITH_GPU, node("n2"), "1 x NVIDIA H100", "no visible GPU"),
        (
            WITH_GPU, node("n2", "GPU-b", build={"torch": "2.7.0", "vllm": "0.10.1"}), "torch 2.8.0", "torch 2.7.0",
        ),
        (WITH_GPU, node("n2", "GPU-b", build={"torch": "2.8.0"}), "vllm 0.10.1", "vllm absent"),
        (
            WITH_GPU, node("n2", "GPU-b", of_gpu={"driver": "560.2", "power_limit_w": 500.0}),
            "driver 570.1, power limit 700 W", "driver 560.2, power limit 500 W",
        ),
        (node("n1", cores="4-11"), node("n2", cores="0-3"), "cores 8", "cores 4"),
    ],
)  # fmt: skip
def test_blocks_on_other_hardware_are_refused_with_what_each_ran_on(results, early, late, first, second):
    place(results, lambda block: late if block > 4 else early)
    (difference,) = differences_of(results)
    before, after = difference.removeprefix("hardware: ").split(" against ")
    assert (before.startswith(first), after.startswith(second)) == (True, True)
    assert before.endswith("(blocks 0, 1, 2, 3, 4 on n1)")
    assert after.endswith("(blocks 5, 6 on n2)")


@pytest.mark.parametrize("allowed", ["hardware", "host", "h*"])
def test_hardware_that_is_allowed_is_pooled_and_listed(results, allowed):
    place(results, lambda block: node("n2", cpu_model="EPYC") if block > 4 else node("n1"))
    with pytest.raises(NotComparableError, match="--allow-difference hardware"):
        compare_arms(results)
    assert undeclared(assert_pooled(results, allow=(allowed,))) == ["hardware"]


def test_older_runs_without_a_node_are_held_to_one_host_as_before(results):
    for planned in results.plan().runs:
        edit_run(results, planned.run_id, host="two" if planned.block > 4 else "one")
    assert differences_of(results) == ('host: "one" or "two" against "one" or "two"',)


def test_devices_that_a_scheduler_chose_and_places_on_several_hosts_are_no_difference_of_servers(results):
    for run in results.plan().runs:
        block, config = run.block, results.run(run.run_id).read().effective_config
        cores = {"server.client_cores": f"client on {block}, server on {block + 1}-{block + 7}"}
        devices = {"CUDA_VISIBLE_DEVICES": f"{block}", "NVIDIA_VISIBLE_DEVICES": f"{block}", "OMP": "4"}
        of_node = node("n1", f"{block}", cores=f"{block}-{block + 7}")
        edit_run(results, run.run_id, node=of_node, env=devices, effective_config=config | cores)
    assert undeclared(compare_arms(results)) == []
    edit_run(results, BASELINE, env={"CUDA_VISIBLE_DEVICES": "0", "OMP": "8"})
    assert differences_of(results) == ('env.OMP: "8" or "4" against "4"',)
    for run in results.plan().runs:
        argv = (f"/scratch/n{run.block}/bin/python", "-m", "vllm")
        edit_run(results, run.run_id, node=node(f"n{run.block}"), argv=argv, env={})
    assert undeclared(compare_arms(results)) == []
    place(results, lambda block: node("n1"))
    assert differences_of(results)[0].startswith("argv.program")


def test_what_a_stranger_calls_a_node_begins_no_line_of_a_refusal(results):
    place(results, lambda block: node("n1\n  seed: 7 against 8", cpu_model=f"\x1b[2J{block > 3}\n"))
    (difference,) = differences_of(results)
    place(results, lambda block: node("n2\nand more"), ("guided",))
    warnings = load_experiment(results.path).block_warnings
    assert codes_of_blocks(results).count("block-on-several-nodes") == 7
    assert not {"\n", "\x1b"} & set(difference + "".join(warning.message for warning in warnings))


THREE = ("n1", "n2", "n3") * 4


def test_blocks_on_one_node_have_no_results_by_node(tmp_path):
    results = write_on_nodes(tmp_path / "r", ("n1",) * 6)
    assert (compare_arms(results).nodes, analyze_directory(results.path).nodes) == (None, ())


def test_the_test_is_the_f_test_of_the_textbook_where_a_node_has_two_blocks():
    groups = [(0.10, 0.12, 0.11), (0.09, 0.13), (0.16, 0.18, 0.15)]
    assert p_of_equal_nodes(groups) == pytest.approx(stats.f_oneway(*groups).pvalue)
    for undecidable in ([(0.1,), (0.2,), (0.1,), (0.3,), (0.1,), (0.2,)], [(0.1, 0.2), (0.3, 0.3)]):
        assert p_of_equal_nodes(undecidable) is None
    certain = ([(0.1,) * 3, (0.1 + 1e-16,) * 3], [(0.1,) * 3, (0.2,) * 3])
    assert [p_of_equal_nodes(groups) for groups in certain] == [1, 0]


@pytest.mark.parametrize("scatter", [0.004, 0.0])
def test_nodes_that_are_alike_are_not_called_different_and_exactly_equal_blocks_neither(tmp_path, scatter):
    results = write_on_nodes(tmp_path, THREE, scatter=scatter)
    comparison = compare_arms(results)
    metric = comparison.nodes.metrics[0]
    assert (messages(comparison, "node-differs"), comparison.nodes.num_tests) == ([], 2 * 3)
    ratios = {row.node: row.ratio for row in metric.rows}
    assert ratios == pytest.approx(dict.fromkeys(("n1", "n2", "n3"), metric.over_blocks.ratio), rel=0.01)
    edit_run(results, next(run.run_id for run in results.plan().runs if run.block == 4), state="failed")
    named = compare_arms(results, metrics=("wall_s",), confidence=0.9).nodes
    assert {row.node: row.num_blocks for row in named.metrics[0].rows} == {"n1": 4, "n2": 3, "n3": 4}
    assert (named.num_tests, named.confidence) == (2, 0.9)


def test_nodes_that_differ_are_named_with_cell_metric_and_size_and_change_no_verdict(tmp_path):
    results = write_on_nodes(tmp_path / "r", THREE, {"n3": 0.05})
    before = compare_arms(results)
    (message,), metric = messages(before, "node-differs"), before.nodes.differing[0]
    ratios = [row.ratio for row in metric.rows]
    assert max(ratios) / min(ratios) == pytest.approx(1.05, abs=0.01)
    for words in (
        f"nodes differ beyond chance: {metric.metric} in {metric.label} changes by +",
        " on n3 (p <0.001, one of 6 tests)",
        "and so in 5 more metrics of these cells",
    ):
        assert words in message
    place(results, lambda block: node())
    assert compare_arms(results).cells == before.cells


def test_with_one_block_per_node_these_cannot_be_told_from_blocks_and_a_table_of_many_has_the_farthest(tmp_path):
    path = write_on_nodes(tmp_path / "r", [f"n{i:02d}" for i in range(14)], {"n07": 0.05}).path
    _, table, _ = in_process("compare", path)
    for words in ("a node cannot be told from a block", "n07", "and 2 nodes more"):
        assert words in table
    assert compare_arms(ResultDirectory(path)).nodes.metrics[0].p_value is None
