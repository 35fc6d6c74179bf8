"""What a check found reads well for people, for programs and as a picture."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch import nn

from trl_packing import LeakError, MissingDependencyError, check_isolation


def test_report_reads_at_80_columns_and_as_json():
    adapted = get_peft_model(tiny_model("gpt_oss"), LoraConfig(target_modules=["q_proj"]))
    for model in (tiny_model("llama"), tiny_model("opt"), nn.Linear(2, 2), adapted):
        report = check_isolation(model)
        text = report.to_text()
        assert max(map(len, text.splitlines())) <= 80
        assert all(probe.name in text for probe in report.probes)
        values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert values["ok"] is report.ok
        assert len(values["influence"]) == len(report.lengths)


def test_influence_shows_who_moves_whom_before_and_after():
    report = check_isolation(tiny_model("llama"), influence=True)
    size = len(report.lengths)
    later = np.triu(np.ones((size, size), dtype=bool), 1)
    assert (report.influence_before[later] > 0).all()
    assert (report.influence_before[later.T] == 0).all()
    assert (report.influence[later | later.T] == 0).all()
    assert np.isnan(check_isolation(tiny_model("llama")).influence_before[1:]).all()


@pytest.mark.parametrize("influence", [False, True])
def test_picture_is_a_png(tmp_path, influence):
    path = tmp_path / "influence.png"
    check_isolation(tiny_model("opt"), influence=influence).save_picture(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_picture_without_matplotlib_names_the_install_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "trl_packing\[plots\]"'):
        check_isolation(tiny_model("llama")).save_picture(tmp_path / "x.png")


def test_message_of_a_leak_names_the_layer_the_segments_the_size_and_the_way_out():
    report = check_isolation(tiny_model("opt"))
    with pytest.raises(LeakError) as error:
        report.raise_if_leaking()
    leak, message = report.layers[0], str(error.value)
    assert f"segment {leak.source} moves segment {leak.target} by {leak.effect:.2g}" in message
    assert "`model.decoder.layers.0.self_attn` (OPTAttention, attention)" in message
    assert 'attn_implementation="varlen"' in message


def test_way_out_is_never_the_setting_that_is_on_already(varlen):
    with pytest.raises(LeakError, match="train it unpacked") as error:
        check_isolation(tiny_model("bloom", attn_implementation=varlen)).raise_if_leaking()
    assert "Load the model with" not in str(error.value)
