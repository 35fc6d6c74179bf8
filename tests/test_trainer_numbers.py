"""The numbers of packed training: those of the same samples run alone, and those of TRL."""

import copy

import pytest
import torch
from datasets import Dataset
from training import (
    Gradients,
    as_dataset,
    byte_tokenizer,
    conversations,
    gradients_alone,
    largest_difference,
    losses,
    model_of,
    packed_trainer,
    plain_copy,
    prompt_completions,
    settings,
)
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTTrainer

KINDS = {
    "all": (conversations(), {}),
    "assistant_only": (conversations(), {"assistant_only_loss": True}),
    "prompt_completion": (prompt_completions(), {}),
    "split": (conversations(), {"max_length": 40, "overlong": "split"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("attention", "lora"),
    [("varlen", "all-linear"), ("varlen", False), ("sdpa", "all-linear"), ("eager", False)],
    ids=str,
)
def test_packed_gradients_equal_those_of_samples_alone(kind, accumulation, attention, lora, tmp_path):
    data, overrides = KINDS[kind]
    gradients = Gradients()
    trainer = packed_trainer(
        tmp_path,
        data,
        model=model_of(attention),
        lora=lora,
        callbacks=[gradients],
        packing=True,
        token_budget=20_000 if accumulation == 1 else 700,
        gradient_accumulation_steps=accumulation if accumulation == 1 else 20,
        num_train_epochs=1,
        max_grad_norm=0.0,
        **overrides,
    )
    reference = plain_copy(trainer.model, lora)
    dataset = trainer._train_plan.fragments()
    samples = [dataset[index] for index in range(len(dataset))]
    trainer.train()
    assert len(gradients.steps) == 1
    assert (trainer._sampler.num_rows > 1) == (accumulation > 1)
    loss, expected = gradients_alone(reference, samples)
    assert losses(trainer)[0] == pytest.approx(loss, rel=1e-5)
    assert largest_difference(gradients.steps[0], expected) <= 1e-5


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_checkpointing_changes_no_gradient(model_type, tmp_path):
    results = []
    for checkpointing in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        gradients = Gradients()
        packed_trainer(
            tmp_path,
            conversations(),
            model=model_of(model_type=model_type),
            lora=True,
            callbacks=[gradients],
            packing=True,
            max_steps=1,
            max_grad_norm=0.0,
            router_aux_loss_coef=0.0,
            gradient_checkpointing=checkpointing is not None,
            gradient_checkpointing_kwargs=checkpointing,
        ).train()
        results.append(gradients.steps[0])
    assert largest_difference(results[1], results[0]) <= 1e-6
    assert largest_difference(results[2], results[0]) <= 1e-6


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"gradient_accumulation_steps": 3}, {"loss_type": "dft"}, {"label_smoothing_factor": 0.1}],
    ids=lambda overrides: next(iter(overrides), "plain"),
)
@pytest.mark.filterwarnings("ignore:.*label_smoothing_factor:FutureWarning")
def test_without_packing_the_curve_is_trls_padded_one(padding_free, overrides, tmp_path):
    """Same samples in the same order: 20 steps agree to 1e-4 relative, gradient norms and counters too."""
    run = {"max_steps": 20, **overrides}
    stock = SFTTrainer(
        model=model_of("sdpa"),
        args=SFTConfig(**settings(tmp_path, **run)),
        train_dataset=as_dataset(conversations(90)),
        processing_class=byte_tokenizer(),
    )
    stock.train()
    ours = packed_trainer(tmp_path, conversations(90), padding_free=padding_free, **run)
    ours.train()
    assert len(losses(ours)) == 20
    for ours_entry, stock_entry in zip(ours.state.log_history[:20], stock.state.log_history[:20], strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert ours_entry[key] == pytest.approx(stock_entry[key], rel=1e-4), key
        assert ours_entry["num_tokens"] == stock_entry["num_tokens"]


def test_token_accuracy_and_entropy_are_weighted_by_predicted_tokens(tmp_path):
    """One micro-batch per step is where TRL's mean of ratios is the ratio of sums, so the numbers must agree there."""
    run = {"max_steps": 3, "assistant_only_loss": True}
    stock = SFTTrainer(
        model=model_of("sdpa"),
        args=SFTConfig(**settings(tmp_path, **run)),
        train_dataset=as_dataset(conversations()),
        processing_class=byte_tokenizer(),
    )
    stock.train()
    ours = packed_trainer(tmp_path, conversations(), **run)
    ours.train()
    for ours_entry, stock_entry in zip(ours.state.log_history[:3], stock.state.log_history[:3], strict=True):
        for key in ("mean_token_accuracy", "entropy"):
            assert ours_entry[key] == pytest.approx(stock_entry[key], rel=1e-4)


def test_a_batch_without_a_trained_token_gives_loss_zero(tmp_path):
    gradients = Gradients()
    trainer = packed_trainer(tmp_path, conversations(4), callbacks=[gradients], max_steps=1)
    batch = trainer.data_collator([{"input_ids": [5, 6, 7], "labels": [-100] * 3}])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(0))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in trainer.model.parameters())


def test_unequal_micro_batches_weigh_by_their_tokens(tmp_path):
    """Micro-batches of many and few trained tokens: one step equals one batch of both, not the mean of means."""
    long, short = "long words " * 60, "no"
    data = [
        {"prompt": "a", "completion": long},
        {"prompt": "a" * 40, "completion": short},
    ]
    results = []
    for batch_size, accumulation in ((1, 2), (2, 1)):
        gradients = Gradients()
        packed_trainer(
            tmp_path,
            data,
            callbacks=[gradients],
            max_steps=1,
            max_length=2048,
            max_grad_norm=0.0,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
        ).train()
        results.append(gradients.steps[0])
    assert largest_difference(*results) <= 1e-5


def test_users_settings_are_restored_and_never_modified(tmp_path):
    from trl_packing import PackedSFTConfig

    args = PackedSFTConfig(**settings(tmp_path, packing=True, padding_free=True, eval_packing=False))
    before = copy.deepcopy(args.to_dict())
    trainer = PackedSFTTrainer(
        model=model_of(), args=args, train_dataset=as_dataset(conversations()), processing_class=byte_tokenizer()
    )
    assert args.to_dict() == before
    assert (trainer.args.packing, trainer.args.padding_free, trainer.args.eval_packing) == (True, True, False)
    assert trainer.args.max_length == 256


def test_plain_sft_config_is_accepted(tmp_path):
    args = SFTConfig(**settings(tmp_path, packing=True, max_steps=1))
    trainer = PackedSFTTrainer(
        model=model_of(), args=args, train_dataset=as_dataset(conversations()), processing_class=byte_tokenizer()
    )
    trainer.train()
    assert trainer.args.overlong is None
    assert trainer.args.resolved_token_budget == 1024
    assert type(args) is SFTConfig


def test_masked_and_packed_columns_are_honoured(tmp_path):
    masked = Dataset.from_list(
        [
            {"input_ids": [0, 0, 5, 6, 7], "labels": [-100, -100, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1]},
            {"input_ids": [8, 9, 0], "labels": [8, 9, -100], "attention_mask": [1, 1, 0]},
        ]
    )
    trainer = packed_trainer(tmp_path, masked, packing=True)
    assert trainer._train_plan.samples.lengths.tolist() == [3, 2]
    packed = Dataset.from_list([{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], "seq_lengths": [1, 3]}])
    trainer = packed_trainer(tmp_path, packed, packing=True)
    row = next(iter(trainer.get_train_dataloader()))
    assert row["cu_seq_lens_q"].tolist() == [0, 1, 4]
    assert row["labels"].tolist() == [[-100, -100, 7, 8]]


def test_a_last_step_that_saves_leaves_no_zeros_in_the_final_log(tmp_path):
    trainer = packed_trainer(
        tmp_path, conversations(8), packing=True, token_budget=300, max_steps=2, save_strategy="steps", save_steps=2
    )
    metrics = trainer.train().metrics
    logged = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry]
    assert len(logged) == 2
    assert all(entry["fill_rate"] > 0 and entry["tokens_per_second"] > 0 for entry in logged)
    assert "tokens_per_second" not in metrics
