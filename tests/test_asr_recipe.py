"""The ASR example trains padded and packed to the same loss, and saves exactly the padding."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import trl_packing
from trl_packing import pack_rows

RECIPE = Path(__file__).parents[1] / "recipes" / "asr_decoder.py"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("asr_decoder", RECIPE)
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_recipe_imports_public_names_only() -> None:
    imports = [node for node in ast.walk(ast.parse(RECIPE.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").startswith("trl_packing")]
    assert [node.module for node in ours] == ["trl_packing"]
    assert {alias.name for node in ours for alias in node.names} <= set(trl_packing.__all__)


def test_padded_and_packed_runs_have_equal_losses(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    padded, packed = recipe.main(["--steps", "3", "--batch-size", "3"])
    assert len(padded.losses) == 3
    assert packed.losses == pytest.approx(padded.losses, rel=1e-5)
    trained, start = dict(packed.model.named_parameters()), dict(padded.model.named_parameters())
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter, start[name], rtol=1e-3, atol=1e-4)
    printed = capsys.readouterr().out
    saved = 1 - packed.num_decoder_tokens / padded.num_decoder_tokens
    assert f"saved {saved:.1%}, the padding share" in printed
    assert "CPU seconds" in printed


@pytest.mark.usefixtures("varlen")
def test_adapters_of_the_packed_run_are_trained(recipe: ModuleType) -> None:
    torch.manual_seed(0)
    model = recipe.SpeechModel()
    (clips,) = recipe.synthetic_clips(1, 2, seed=0)
    recipe.packed_loss(model, clips)[0].backward()
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("lora_B" in name for name in trainable)
    # A receives no gradient while B is zero.
    assert all(parameter.grad.any() for name, parameter in trainable.items() if "lora_A" not in name)


@pytest.mark.usefixtures("varlen")
def test_decoder_tokens_fall_by_the_padding_share_exactly(recipe: ModuleType) -> None:
    model = recipe.SpeechModel()
    for clips in recipe.synthetic_clips(3, 6, seed=1):
        packed = pack_rows(*model.decoder_batch(clips))
        num_padded, num_packed = recipe.padded_loss(model, clips)[1], recipe.packed_loss(model, clips)[1]
        per_row = [
            -(-frames // recipe.FRAMES_PER_TOKEN) + len(text)
            for frames, text in zip(clips.num_frames, clips.transcripts, strict=True)
        ]
        assert (num_padded, num_packed) == (len(per_row) * max(per_row), sum(per_row))
        assert 1 - num_packed / num_padded == packed.padding_share


def test_wrong_number_is_a_usage_error(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        recipe.main(["--steps", "0"])
    assert "--steps and --batch-size need at least 1" in capsys.readouterr().err


def test_clips_are_as_long_as_promised(recipe: ModuleType) -> None:
    frames = [n for clips in recipe.synthetic_clips(30, 20, seed=0) for n in clips.num_frames]
    seconds = torch.tensor(frames) / recipe.FRAMES_PER_SECOND
    assert 0.1 <= seconds.min() < 1
    assert 29 < seconds.max() <= 30
    assert abs(seconds.mean() - 15.05) < 1
