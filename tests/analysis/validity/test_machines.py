"""The machines of an experiment are those that measured its runs, wherever it was created."""

import msgspec
import pytest
from support.peaks import gpu_peaks
from support.results.builders import edit_manifest, edit_run, write_results

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.experiment import load_experiment
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.planning import noise_of_experiment
from benchctl.analysis.validity.machines import machines_of
from benchctl.errors import NotComparableError
from benchctl.measure.on_file import gpu_names_here
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


def node(name, *gpus, hostname=None, **fields):
    """A node with these devices, which are H100s."""
    devices = tuple(
        NodeGpu(index=i, name="NVIDIA H100", uuid=uuid, driver="570.1", memory_bytes=80 << 30)
        for i, uuid in enumerate(gpus)
    )
    values = {"cpu_model": "Xeon", "cores": "0-15", "platform": "Linux-6", "memory_bytes": 512 << 30}
    return NodeInfo(name=name, hostname=hostname or name, gpus=devices, **values | fields)


def measured_on(tmp_path, node_of, name="a", **changes):
    """Results that were created on the host ``login`` and measured where ``node_of`` says, by block."""
    results = write_results(tmp_path / name, block_factors=SEVEN)
    host = msgspec.structs.replace(results.manifest().host, hostname="login")
    edit_manifest(results, host=host, gpus=(LOGIN_GPU,), **changes)
    for planned in results.plan().runs:
        edit_run(results, planned.run_id, node=node_of(planned.block), engine=changes.get("engine", "sim"))
    return results


def on_two(block):
    return node(f"n{block % 2}", f"GPU-{block % 2}")


def test_runs_of_nodes_are_not_said_to_be_those_of_the_host_that_created_the_experiment(tmp_path):
    results = measured_on(tmp_path, on_two)
    machines = machines_of(load_results(results.path))
    assert [(m.node, m.num_cores, [gpu.uuid for gpu in m.gpus], m.blocks) for m in machines] == [
        ("n0", 16, ["GPU-0"], (0, 2, 4, 6)),
        ("n1", 16, ["GPU-1"], (1, 3, 5)),
    ]
    analysis = analyze_directory(results.path)
    assert headline(analysis).endswith("2 nodes (n0, n1), 2 x NVIDIA H100")
    facts = dict(directory_values(analysis)["facts"])
    assert facts["2 nodes"] == [
        "n0: Xeon, 16 cores, 512.0 GiB, Linux-6; 4 blocks",
        "n1: Xeon, 16 cores, 512.0 GiB, Linux-6; 3 blocks",
    ]
    assert facts["GPUs"][1] == "n1: NVIDIA H100, 80.0 GiB, driver 570.1, GPU-1"
    assert facts["created on"].startswith("login, ")
    assert "host" not in facts
    assert [machine["node"] for machine in show_document(analysis)["machines"]] == ["n0", "n1"]


def test_devices_of_several_blocks_of_one_node_are_those_of_one_machine(tmp_path):
    results = measured_on(
        tmp_path, lambda block: node("n0", f"GPU-{block % 4}", cores=f"{block % 4 * 4}-{block % 4 * 4 + 3}")
    )
    (machine,) = machines_of(load_results(results.path))
    assert [gpu.uuid for gpu in machine.gpus] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert machine.num_cores == 16


def test_older_results_and_those_of_the_creating_host_keep_what_the_manifest_says(tmp_path):
    older = measured_on(tmp_path, lambda block: None)
    (machine,) = machines_of(load_results(older.path))
    assert (machine.node, machine.gpus[0].uuid, machine.blocks) == ("login", "GPU-login", ())
    here = measured_on(tmp_path, lambda block: node("login"), name="b")
    analysis = analyze_directory(here.path)
    assert headline(analysis).endswith("login, Quadro P400")
    assert "created on" not in dict(directory_values(analysis)["facts"])


def test_an_experiment_that_was_continued_elsewhere_has_both_machines(tmp_path):
    results = measured_on(tmp_path, lambda block: node("n1") if block > 3 else None)
    for planned in results.plan().runs:
        edit_run(results, planned.run_id, host="login" if planned.block < 4 else "n1")
    assert [machine.node for machine in machines_of(load_results(results.path))] == ["login", "n1"]


def test_flops_are_compared_with_the_device_that_measured(tmp_path):
    results = measured_on(tmp_path, on_two, engine="vllm")
    experiment = load_experiment(results.path)
    assert experiment.hardware.name == "h100-sxm"
    assert [warning.code for warning in experiment.warnings] == []
    elsewhere = measured_on(tmp_path, lambda block: node("n1"), name="b", engine="vllm")
    assert load_experiment(elsewhere.path).hardware is None


def test_peaks_of_a_machine_that_measured_nothing_are_not_used(tmp_path):
    results = measured_on(tmp_path, on_two, engine="vllm")
    write_json_atomic(results.path / PEAKS.file, gpu_peaks(host="login", device="Quadro P400"))
    assert load_experiment(results.path).hardware.measured_at is None
    write_json_atomic(results.path / PEAKS.file, gpu_peaks(host="n1", device="NVIDIA H100"))
    assert load_experiment(results.path).hardware.measured_at is not None


def noise(host):
    return NoiseFloor(
        schema_version=3, measured_at="2026-01-01T00:00:00Z", source="aa", host=host, engine="vllm",
        engine_sha256="0", model="qwen2.5-7b", request_set_sha256="0",
        metrics={"step_ms": MetricNoise(log_sd=0.1, num_blocks=8, floor_frac=0.9)},
    )  # fmt: skip


@pytest.mark.parametrize(("host", "is_used"), [("login", False), ("n1", True)])
def test_noise_of_a_host_that_measured_nothing_is_left_out_with_a_warning(tmp_path, host, is_used):
    results = measured_on(tmp_path, on_two, engine="vllm")
    write_json_atomic(results.path / NOISE.file, noise(host))
    sides = (parse_side(f"{results.path}:{variant}") for variant in ("baseline", "guided"))
    compared = compare_sides(*sides, CompareOptions())
    assert bool(compared.noise) is is_used
    messages = [w.message for w in compared.warnings if w.code == "noise-of-another-machine"]
    assert len(messages) == (0 if is_used else 1)
    assert is_used or messages[0].startswith(
        "the noise floor is that of login, and the runs were measured on 2 nodes"
    )


def test_a_noise_floor_is_that_of_one_machine(tmp_path):
    results = measured_on(tmp_path, on_two, engine="vllm")
    profile = results.path / "profile.yaml"
    text = profile.read_text()
    begin, end = text.index("  guided:"), text.index("sweep:")
    profile.write_text(text[:begin] + "  guided: {}\n")
    assert end > begin
    with pytest.raises(NotComparableError, match=r"2 nodes \(n0, n1\).*one machine"):
        noise_of_experiment(load_experiment(results.path))


def test_two_directories_are_held_against_each_other_by_the_machines_that_measured(tmp_path):
    left = measured_on(tmp_path, on_two)
    right = measured_on(
        tmp_path, lambda block: node(f"m{block % 4}", f"GPU-m{block % 4}", build={"torch": "2.9.0"}), name="b",
        created_at="2026-02-01T00:00:00Z",
    )  # fmt: skip
    for planned in left.plan().runs:
        edit_run(
            left, planned.run_id, node=msgspec.structs.replace(on_two(planned.block), build={"torch": "2.8.0"})
        )
    compared = compare_sides(parse_side(str(left.path)), parse_side(str(right.path)), CompareOptions())
    messages = {w.where: w.message for w in compared.warnings if w.code == "machines-differ"}
    assert messages == {
        "host": "host differs: 2 nodes: n0, n1 (Xeon, 16 cores, Linux-6) against 4 nodes: m0, m1, m2, m3 (Xeon, 16 "
        "cores, Linux-6)",
        "GPUs": "GPUs differs: 2 nodes: 2 x NVIDIA H100 driver 570.1 against 4 nodes: 4 x NVIDIA H100 driver 570.1",
        "engine build": "engine build differs: torch 2.8.0 against torch 2.9.0",
    }


def test_durations_of_a_run_elsewhere_are_not_stored_for_the_devices_of_the_creating_host(tmp_path, monkeypatch):
    results = measured_on(tmp_path, lambda block: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_names_here(results.manifest()) == ()
    monkeypatch.setattr("platform.node", lambda: "login")
    assert gpu_names_here(results.manifest()) == ("Quadro P400",)
