"""benchmarks/gpu.py without a GPU: what runs as soon as one is at hand, on tiny models and stand-in kernels."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from kernel_stand_ins import Kernels

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: importlib.import_module(name)


def rows_of(emitted, table):
    return {row["implementation"]: row for row in emitted if row["table"] == table and "implementation" in row}


def test_a_section_keeps_its_rows_whatever_ends_it(modules):
    gpu = modules("gpu")
    script = """print('ROW {"table": "t"}', flush=True); import sys, time; time.sleep(%d); sys.exit('broken')"""
    failed = gpu.run_section([sys.executable, "-c", script % 0], 20)
    assert failed["rows"] == [{"table": "t"}]
    assert failed["failure"] == "exit code 1: broken"
    late = gpu.run_section([sys.executable, "-c", script % 60], 1)
    assert late["rows"] == [{"table": "t"}]
    assert late["failure"].startswith("out of time after 1 s")
    assert not gpu.show_section("late", late)


def test_budgets_fit_into_the_call(modules):
    gpu = modules("gpu")
    assert sum(gpu.BUDGETS.values()) <= gpu.TOTAL < 8 * 60


def test_every_implementation_is_called_and_holds_its_limits(modules, monkeypatch):
    kernels = modules("gpu_kernels")
    stand_ins, emitted = Kernels(monkeypatch, "fla", "causal_conv1d", "mamba_ssm"), []
    stand_ins.say_cpu_is_a_gpu()
    kernels.kernels("cpu", "tiny", emitted.append, build=stand_ins.model)
    assert not [row for row in emitted if "failed" in row]
    assert [row["table"] for row in emitted if "skipped" in row] == ["flash_attn"]
    assert {row["holds"] for row in emitted if "holds" in row} == {"yes"}
    ours = {"ours, host lengths", "ours, seq_idx"}
    assert rows_of(emitted, "causal_conv1d_fn").keys() == ours | {"causal_conv1d kernel", "fla convolution"}
    assert rows_of(emitted, "mamba_chunk_scan_combined").keys() == ours | {"mamba_ssm kernel"}
    for name in ("chunk_gated_delta_rule", "chunk_kda"):
        assert rows_of(emitted, name).keys() == ours | {"fla kernel"}
    assert set(stand_ins.names()) == {
        *("chunk_gated_delta_rule", "chunk_kda", "causal_conv1d_fn", "fla convolution", "mamba_chunk_scan_combined")
    }


def test_a_leak_an_error_and_an_exception_are_reported(modules):
    kernels, emitted = modules("gpu_kernels"), []
    row = kernels.ROW["tiny"]

    def raises(inputs, boundaries):
        raise RuntimeError("no such kernel")

    calls = {
        "reference": kernels._segments,
        "leaks": lambda inputs, boundaries: kernels._segments(inputs, kernels.Boundaries((boundaries.total_tokens,))),
        "wrong": lambda inputs, boundaries: 1.05 * kernels._segments(inputs, boundaries),
        "raises": raises,
    }
    kernels.examine("attention", calls, kernels.attention_inputs(row), "cpu", "tiny", emitted.append)
    found = rows_of(emitted, "attention")
    assert found["leaks"]["holds"] == found["wrong"]["holds"] == "no"
    assert float(found["leaks"]["leak"]) > 0.01
    assert float(found["wrong"]["leak"]) == 0
    assert emitted[-1] == {"table": "attention", "failed": "raises: RuntimeError: no such kernel"}


def test_reads_are_counted_in_whole_micro_steps(modules):
    models = modules("gpu_models")
    config = models.config_of("llama", "tiny")
    counts = {variant: models._reads(variant, config, "cpu", "tiny") for variant in ("TRL bfd", "ours")}
    assert counts["ours"]["item"] == 0 < counts["TRL bfd"]["item"]


def test_models_of_about_a_billion_parameters_have_every_kind_of_layer(modules):
    models = modules("gpu_models")
    for architecture in models.ARCHITECTURES:
        with torch.device("meta"):
            whole, part = (
                models.AutoModelForCausalLM.from_config(models.config_of(architecture, "1b", layers))
                for layers in (None, 4)
            )
        assert 0.8e9 < sum(parameter.numel() for parameter in whole.parameters()) < 1.4e9
        kinds = [{type(module) for module in model.modules()} for model in (whole, part)]
        assert kinds[0] == kinds[1]


@pytest.mark.slow
def test_every_variant_trains_and_ours_compiles(modules):
    models, emitted = modules("gpu_models"), []
    models.throughput("llama", "cpu", "tiny", 4.0, emitted.append)
    assert [row.get("variant", row.get("holds")) for row in emitted] == ["yes", *models.VARIANTS]
    assert all(row["tokens/s"] > 0 for row in emitted[1:])
    row = models._compiled("llama", "cpu", "tiny")
    assert row["graph breaks"] == 0
    assert row["graphs"] <= 2 * row["bounds"]
