"""Samples with images, packed after TRL's own collator: the numbers of TRL's padded run, on every layout of images."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from peft import LoraConfig
from tiny_vision import ImagesOnly, picture_talks, tiny_processor, tiny_vision_model
from training import Gradients, largest_difference, losses, settings
from trl import SFTConfig, SFTTrainer

from trl_packing import LeakError, PackedSFTConfig, PackedSFTTrainer, PackingError, register_ops, unregister_ops
from trl_packing.collator import ROW_INFO
from trl_packing.vision import check_images, samples_to_prove

# 1-D positions, 3-D positions (M-RoPE) of three kinds, the last with Gated DeltaNet, and images that come per sample.
ARCHITECTURES = ["llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "idefics3"]


def vision_trainer(
    output_dir: Any,
    model_type: str = "llava",
    *,
    stock: bool = False,
    data: Any = None,
    model: Any = None,
    **options: Any,
) -> Any:
    register_ops()
    named = {key: options.pop(key) for key in ("callbacks", "eval_dataset", "peft_config") if key in options}
    options = {"per_device_train_batch_size": 3, "max_length": None, "max_grad_norm": 0.0, **options}
    trainer_class, config_class = (SFTTrainer, SFTConfig) if stock else (PackedSFTTrainer, PackedSFTConfig)
    return trainer_class(
        model=tiny_vision_model(model_type, "sdpa" if stock else "varlen") if model is None else model,
        args=config_class(**settings(output_dir, **options)),
        train_dataset=picture_talks() if data is None else data,
        processing_class=tiny_processor(model_type),
        **named,
    )


@pytest.mark.parametrize(
    ("model_type", "completions"), [*((name, False) for name in ARCHITECTURES), ("llava", True), ("qwen2_5_vl", True)]
)
def test_three_packed_steps_equal_trls_padded_steps(model_type: str, completions: bool, tmp_path: Any) -> None:
    """Samples with none, one and two images in one row, the last row shorter than the others."""
    curves, steps = [], []
    for stock in (True, False):
        seen = Gradients()
        trainer = vision_trainer(
            tmp_path,
            model_type,
            stock=stock,
            data=picture_talks(completions=completions),
            callbacks=[seen],
            max_steps=3,
        )
        trainer.train()
        curves.append(losses(trainer))
        steps.append(seen.steps)
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    for padded, packed in zip(*steps, strict=True):
        assert largest_difference(packed, padded) < 1e-5
    tower = next(name for name in steps[0][0] if "vision" in name or "visual" in name)
    assert float(steps[1][0][tower].abs().max()) > 0
    assert trainer.isolation_report.ok


def test_accumulated_steps_with_adapters_equal_trls(tmp_path: Any) -> None:
    lora = LoraConfig(r=4, target_modules=r".*language_model.*\.[qv]_proj", init_lora_weights=False)
    curves = []
    for stock in (True, False):
        torch.manual_seed(0)
        trainer = vision_trainer(
            tmp_path, stock=stock, peft_config=lora, gradient_accumulation_steps=2, per_device_train_batch_size=2
        )
        # Adapters of their own seed: the two trainers draw random numbers in another order.
        generator = torch.Generator().manual_seed(1)
        for name, parameter in sorted(trainer.model.named_parameters()):
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) / 10
        trainer.train()
        curves.append(losses(trainer))
    assert len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_a_row_is_what_trls_collator_made_without_the_pads(tmp_path: Any) -> None:
    trainer = vision_trainer(tmp_path, "qwen2_5_vl")
    collator = trainer._image_collator
    samples = [{**trainer.train_dataset[index], "fragment": index} for index in range(3)]
    row = collator(samples)
    padded = trainer._padded_collator([dict(sample) for sample in samples])
    mask = padded["attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    assert row[ROW_INFO].boundaries.lengths == tuple(lengths)
    assert row["input_ids"][0].tolist() == padded["input_ids"][mask].tolist()
    assert torch.equal(row["pixel_values"], padded["pixel_values"])
    assert "attention_mask" not in row
    text, *axes = row["position_ids"][:, 0]
    assert text.tolist() == [position for length in lengths for position in range(length)]
    # Inside an image time stands still, and the three axes go ways of their own.
    assert not torch.equal(axes[0], axes[1])
    assert row["labels"][0, [0, lengths[0]]].tolist() == [-100, -100]
    assert len(samples[0]["images"]) == 1


def test_every_sample_is_trained_once_whatever_the_ranks(tmp_path: Any) -> None:
    trainer = vision_trainer(tmp_path, data=picture_talks(7))
    plan = trainer._plan_training()
    assert trainer._train_plan is not None
    samplers = [trainer._train_plan.sampler(num_ranks=2, rank=rank) for rank in range(2)]
    rows = [list(sampler) for sampler in samplers]
    assert len(rows[0]) == len(rows[1])
    assert sorted(number for rank in rows for row in rank for number in row) == list(range(7))
    assert len(plan) == 3


def test_a_rank_without_samples_runs_its_tower_and_counts_nothing(tmp_path: Any) -> None:
    trainer = vision_trainer(tmp_path)
    row = trainer._image_collator([])
    info = row[ROW_INFO]
    assert "pixel_values" in row
    assert (info.num_tokens, info.num_targets, info.num_segments) == (0, 0, 0)
    assert set(row["labels"][0].tolist()) == {-100}


def test_evaluation_is_the_sum_over_predicted_tokens(tmp_path: Any) -> None:
    results = []
    for batch_size, options in ((8, {"eval_packing": False}), (3, {}), (1, {})):
        trainer = vision_trainer(
            tmp_path, eval_dataset=picture_talks(8, seed=1), per_device_eval_batch_size=batch_size, **options
        )
        results.append(trainer.evaluate()["eval_loss"])
    assert results[1:] == pytest.approx([results[0]] * 2, rel=1e-6)


def test_cut_tokens_are_counted_and_images_are_never_cut(tmp_path: Any) -> None:
    data = picture_talks()
    lengths = [len(row["input_ids"][0]) for row in map(vision_trainer(tmp_path)._image_collator, _singles(data))]
    limit = sorted(lengths)[4]
    trainer = vision_trainer(tmp_path, data=data, max_length=limit, num_train_epochs=1)
    trainer.train()
    logged = sum(entry.get("num_cut_tokens", 0) for entry in trainer.state.log_history)
    assert logged == sum(max(length - limit, 0) for length in lengths) > 0
    with pytest.raises(PackingError, match="`max_length` = 8 cuts through an image"):
        vision_trainer(tmp_path, data=data, max_length=8).train()
    with pytest.raises(PackingError, match=r"A sample has \d+ tokens, more than `max_length`"):
        vision_trainer(tmp_path, data=data, max_length=limit, overlong="error").train()


@pytest.mark.parametrize("eval_packing", [None, False])
def test_cut_tokens_of_an_evaluation_are_counted_padded_or_not(eval_packing: bool | None, tmp_path: Any) -> None:
    data = picture_talks()
    lengths = [len(row["input_ids"][0]) for row in map(vision_trainer(tmp_path)._image_collator, _singles(data))]
    limit = sorted(lengths)[4]
    options = {"eval_packing": eval_packing, "eval_dataset": data, "max_length": limit}
    trainer = vision_trainer(tmp_path, data=data, **options)
    trainer.evaluate()
    cut = sum(max(length - limit, 0) for length in lengths)
    assert trainer.state.log_history[-1]["eval_num_cut_tokens"] == cut
    with pytest.raises(PackingError, match=r"A sample has \d+ tokens, more than `max_length`"):
        vision_trainer(tmp_path, data=data, overlong="error", **options).evaluate()


def _singles(data: Dataset) -> list[list[dict[str, Any]]]:
    return [[{**data[index], "fragment": index}] for index in range(len(data))]


# ---- the proof


def test_the_proof_sees_images_that_are_merged_into_the_wrong_sample(tmp_path: Any) -> None:
    trainer = vision_trainer(tmp_path)
    samples = samples_to_prove(trainer.train_dataset)
    assert [len(sample["images"]) for sample in samples] == [1, 0, 2]
    assert "3 samples give" in check_images(trainer.model, trainer._image_collator, samples)

    def swapped(rows: Any) -> dict[str, Any]:
        row = trainer._image_collator(rows)
        return {**row, "pixel_values": row["pixel_values"].flip(0)}

    swapped.padded = trainer._image_collator.padded  # type: ignore[attr-defined]
    swapped.host_offsets = True  # type: ignore[attr-defined]
    with pytest.raises(LeakError, match="other logits in a packed row than alone"):
        check_images(trainer.model, swapped, samples)  # type: ignore[arg-type]


def test_wrong_positions_stop_the_run_before_step_1(tmp_path: Any) -> None:
    trainer = vision_trainer(tmp_path, "qwen2_5_vl")
    trainer._image_collator.rope_index = None
    with pytest.raises(LeakError, match="other logits in a packed row than alone"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_rounding_in_half_precision_is_no_leak(how: str, tmp_path: Any) -> None:
    """Another row length rounds otherwise in Gated DeltaNet. Images in the wrong place are still seen."""
    register_ops()
    model = tiny_vision_model("qwen3_5", "varlen")
    model = model.to(torch.bfloat16) if how == "weights" else model
    trainer = vision_trainer(tmp_path, "qwen3_5", model=model, bf16=how == "autocast", max_steps=1)
    trainer.train()
    trainer._image_collator.rope_index = None
    with pytest.raises(LeakError, match="other logits in a packed row than alone"):
        check_images(trainer.model, trainer._image_collator, samples_to_prove(trainer.train_dataset))


def _mixing(model: Any, share: float, packed_only: bool) -> Any:
    """A tower that adds a share of the first image to all others, in every batch or in packed rows only."""
    original, is_packed = model.model.get_image_features, [False]
    model.register_forward_pre_hook(
        lambda _, __, kwargs: is_packed.__setitem__(0, "seq_idx" in kwargs), with_kwargs=True
    )

    def mixed(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        first, *others = output.pooler_output
        if is_packed[0] or not packed_only:
            mean = first.mean(0, keepdim=True)
            others = [other + share * mean * other.norm(dim=-1).mean() / mean.norm() for other in others]
        output.pooler_output = [first, *others]
        return output

    model.model.get_image_features = mixed
    return model


@pytest.mark.parametrize(
    ("model_type", "dtype", "packed_only", "late"),
    [
        pytest.param("qwen2_5_vl", torch.float32, False, False, id="float32"),
        pytest.param("qwen2_5_vl", torch.bfloat16, False, False, id="bfloat16"),
        pytest.param("qwen2_5_vl", torch.bfloat16, True, False, id="bfloat16_packed_only"),
        pytest.param("qwen3_vl_moe", torch.bfloat16, False, False, id="experts"),
        pytest.param("qwen2_5_vl", torch.float32, True, True, id="late"),
    ],
)
def test_a_tower_that_mixes_a_little_is_refused(
    model_type: str, dtype: torch.dtype, packed_only: bool, late: bool, tmp_path: Any
) -> None:
    """Also where half precision, experts or a padded batch that mixes too would hide it, and images come late."""
    data = picture_talks(12)
    if late:
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
        text = Dataset.from_list([{"images": [], "messages": turns}] * 70, features=data.features)
        data = concatenate_datasets([text, data])
    register_ops()
    model = tiny_vision_model(model_type, "varlen").to(dtype)
    trainer = vision_trainer(tmp_path, model_type, model=_mixing(model, 0.02, packed_only), data=data)
    with pytest.raises(LeakError, match="The pixels of one sample move another in the same row"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_samples_to_prove_are_found_in_any_order() -> None:
    data = picture_talks(8)
    assert [len(sample["images"]) for sample in samples_to_prove(data.select([3, 1, 6, 2]))] == [1, 0, 2]
    assert [len(sample["images"]) for sample in samples_to_prove(data.select([2]))] == [2, 2]
    one = [{"image": image, "messages": data[0]["messages"]} for image in (None, data[0]["images"][0])]
    found = samples_to_prove(Dataset.from_list(one))
    assert [sample["image"] is None for sample in found] == [False, True]


@pytest.mark.parametrize("model_type", ["llava", "idefics3"])
def test_one_sample_with_an_image_is_proven_beside_itself_and_none_proves_nothing(
    model_type: str, tmp_path: Any
) -> None:
    data = picture_talks(2)
    trainer = vision_trainer(tmp_path, model_type, data=data)
    for chosen, said in (([0], "2 samples give in a packed row"), ([1], "nothing is proven about them")):
        samples = samples_to_prove(data.select(chosen))
        assert said in check_images(trainer.model, trainer._image_collator, samples)


def test_the_check_leaves_the_model_as_it_was(tmp_path: Any) -> None:
    trainer = vision_trainer(tmp_path, "qwen2_5_vl")
    assert trainer.model.model.rope_deltas is None
    check_images(trainer.model, trainer._image_collator, samples_to_prove(trainer.train_dataset))
    assert trainer.model.model.rope_deltas is None
    assert trainer.model.training


def test_the_texts_boundaries_do_not_reach_the_tower(tmp_path: Any) -> None:
    trainer = vision_trainer(tmp_path, "qwen2_5_vl")
    seen: dict[str, Any] = {}
    trainer.model.model.visual.register_forward_pre_hook(lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True)
    row = trainer._image_collator([{**trainer.train_dataset[0], "fragment": 0}])
    row.pop(ROW_INFO)
    trainer.model(**row)
    assert "grid_thw" in seen
    assert not {"cu_seq_lens_q", "max_length_q", "seq_idx", "cu_seqlens_cpu"} & set(seen)
    unregister_ops()
    try:
        assert not any(
            "_without_boundaries" in str(hook) for hook in trainer.model.model.visual._forward_pre_hooks.values()
        )
    finally:
        register_ops()


def test_positions_come_from_a_copy_without_weights_in_a_worker(tmp_path: Any) -> None:
    collator = vision_trainer(tmp_path, "qwen3_vl")._image_collator
    samples = [{**sample, "fragment": index} for index, sample in enumerate(picture_talks(3))]
    # Under 100 kB: the model alone has more.
    dumped = pickle.dumps(collator.rope_index)
    assert len(dumped) < 1e5
    expected = collator(samples)["position_ids"]
    collator.rope_index = pickle.loads(dumped)
    assert torch.equal(collator(samples)["position_ids"], expected)


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": True, "max_length": 64}, "`packing: true`"),
        ({"eval_packing": True, "max_length": 64}, "`eval_packing: true`"),
        ({"overlong": "drop"}, "`overlong: drop`"),
        ({"pad_to_multiple_of": 8}, "`pad_to_multiple_of`"),
        ({"truncation_mode": "keep_end"}, "`truncation_mode: keep_end`"),
        ({"data": "stream", "max_steps": 1}, "A streamed data set"),
    ],
    ids=["packing", "eval_packing", "drop", "multiple", "keep_end", "stream"],
)
def test_settings_that_need_lengths_are_refused(options: dict[str, Any], message: str, tmp_path: Any) -> None:
    if options.get("data") == "stream":
        options = {**options, "data": picture_talks().to_iterable_dataset()}
    with pytest.raises(PackingError, match=message):
        vision_trainer(tmp_path, **options)


def test_images_whose_tokens_see_one_another_are_refused_by_name(tmp_path: Any) -> None:
    from tiny_models import tiny_model

    with pytest.raises(PackingError, match="Gemma3ForConditionalGeneration cannot be trained"):
        vision_trainer(tmp_path, model=tiny_model("gemma3"))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_resumed_full_fine_tune_goes_on_bit_for_bit(model_type: str, tmp_path: Any, monkeypatch: Any) -> None:
    """The class of a vision-language model reads names that its own `save_pretrained` has changed."""
    # A processor without its video part cannot be written.
    monkeypatch.setattr(ImagesOnly, "save_pretrained", lambda self, *args, **kwargs: [])
    options = {"data": picture_talks(12), "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
    whole = vision_trainer(tmp_path, model_type, num_train_epochs=1, **options)
    whole.train()
    resumed = vision_trainer(tmp_path / "resumed", model_type, num_train_epochs=1, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(losses(whole)) > 2
    assert losses(resumed) == losses(whole)
