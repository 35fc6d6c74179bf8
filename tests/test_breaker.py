"""What a newcomer broke: each mistake in one sentence, and nothing refused that is right."""

import pytest
from datasets import Dataset
from peft import LoraConfig
from training import as_dataset, byte_tokenizer, conversations, losses, model_of, packed_trainer, settings

from trl_packing import Boundaries, PackedSFTConfig, PackedSFTTrainer, PackingError, check_isolation, register_ops
from trl_packing.quickstart import resolve_model


def trainer_with(tmp_path, peft_config=None, **kwargs):
    return PackedSFTTrainer(
        model=model_of(),
        args=PackedSFTConfig(**settings(tmp_path, packing=True, max_steps=2)),
        train_dataset=as_dataset(conversations()),
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [{"input_ids": [5, 6, 7], "labels": [5, 6, 7], "attention_mask": [1, 1]}],
            "2 in `attention_mask`",
        ),
        ([{"input_ids": [5, 6]}, {"input_ids": [5, 6, 7]}], None),
        (
            [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1, 1]}],
            "Sample 0 .*but 4 in `completion_mask`",
        ),
        ([{"input_ids": [5, 6]}, {"input_ids": [5, 6, 99999]}], "Token 99999 of sample 1"),
        ([{"input_ids": [5, -1]}], "Token -1 of sample 0"),
        ([{"txt": "a"}], "columns txt, but training reads .* or `text`"),
        ([{"prompt": "a"}], "columns prompt, but training reads"),
        ([], "no samples"),
    ],
)
def test_data_mistakes_are_named(samples, message, tmp_path):
    data = Dataset.from_list(samples)
    if message is None:
        packed_trainer(tmp_path, data)
        return
    with pytest.raises(PackingError, match=message):
        packed_trainer(tmp_path, data)


def test_a_list_is_no_data_set(tmp_path):
    with pytest.raises(PackingError, match=r"must be a `datasets\.Dataset`"):
        PackedSFTTrainer(model=model_of(), args=PackedSFTConfig(**settings(tmp_path)), train_dataset=[{"text": "a"}])


def test_text_without_an_end_of_sequence_token_is_refused(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(PackingError, match="end-of-sequence token"):
        PackedSFTTrainer(
            model=model_of(),
            args=PackedSFTConfig(**settings(tmp_path)),
            train_dataset=Dataset.from_list([{"text": "a"}]),
            processing_class=tokenizer,
        )


def test_streams_need_an_end_and_a_sample(tmp_path):
    with pytest.raises(PackingError, match="`max_steps`"):
        packed_trainer(tmp_path, as_dataset(conversations(4)).to_iterable_dataset())
    masked = Dataset.from_list([{"input_ids": [5, 6], "labels": [-100, -100]}] * 3).to_iterable_dataset()
    trainer = packed_trainer(tmp_path, masked, max_steps=2, isolation_check="off")
    with pytest.raises(PackingError, match="have no trained label"):
        trainer.train()


def test_tokens_trained_one_by_one_need_not_occur_in_the_first_step(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2], task_type="CAUSAL_LM")
    trainer = PackedSFTTrainer(
        model=model_of(tie_word_embeddings=False),
        args=PackedSFTConfig(**settings(tmp_path, packing=True, max_steps=1)),
        train_dataset=as_dataset(conversations()),
        processing_class=byte_tokenizer(),
        peft_config=config,
    )
    trainer.train()
    assert len(losses(trainer)) == 1


def test_an_adapter_on_the_embeddings_trains(tmp_path):
    trainer = trainer_with(tmp_path, LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]))
    trainer.train()
    assert len(losses(trainer)) == 2


def test_a_target_that_matches_nothing_is_named(tmp_path):
    with pytest.warns(UserWarning, match="v_prj"):
        trainer_with(tmp_path, LoraConfig(r=4, target_modules=["q_proj", "v_prj"]))


def test_a_short_context_is_no_leak():
    from tiny_models import tiny_model

    model = tiny_model("gpt2", n_positions=64, attn_implementation="sdpa")
    assert check_isolation(model).ok


def test_raw_data_can_be_predicted(tmp_path):
    trainer = trainer_with(tmp_path, eval_dataset=as_dataset(conversations(3)))
    assert trainer.predict(as_dataset(conversations(3))).metrics["test_loss"] > 0


def test_wrong_values_are_refused():
    with pytest.raises(PackingError, match="packing_strategy"):
        PackedSFTConfig("x", use_cpu=True, bf16=False, packing_strategy="bdf")
    with pytest.raises(PackingError, match="`per_device_train_batch_size` must be at least 1"):
        PackedSFTConfig("x", use_cpu=True, bf16=False, per_device_train_batch_size=0)
    with pytest.raises(PackingError, match="`ops` is one of"):
        register_ops(ops="cuda")
    with pytest.raises(PackingError, match="are integers"):
        Boundaries.from_lengths([3.0, 2.5])
    with pytest.raises(PackingError, match="quickstart/tiny-llama"):
        resolve_model("quickstart/tiny-lama")
