"""Settings that packing would break without a message: refused by name, before the data is touched."""

import pytest
import torch
from accelerate import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from tiny_models import TINY_TYPES, tiny_config, tiny_model
from training import byte_tokenizer, conversations, model_of, packed_trainer, settings
from transformers import LlamaConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packing import (
    LeakError,
    PackedCollator,
    PackedSFTConfig,
    PackedSFTTrainer,
    PackingError,
    check_isolation,
    register_ops,
)
from trl_packing.preflight import check_model, choose_attention, refuse_parallelism, refuse_settings
from trl_packing.register.attention import WITHOUT_VARLEN


class Untouchable(Dataset):
    """A data set that fails when a sample is read."""

    def __iter__(self):
        raise AssertionError("the data was touched")

    def map(self, *args, **kwargs):
        raise AssertionError("the data was touched")


def untouchable():
    dataset = Dataset.from_list(conversations(2))
    dataset.__class__ = Untouchable
    return dataset


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy: wrapped"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: group_by_length"),
        ({"packing": True, "train_sampling_strategy": "sequential"}, "train_sampling_strategy: sequential"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"neftune_noise_alpha": 5.0, "torch_compile": True}, "neftune_noise_alpha"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_are_refused_by_name_before_the_data(overrides, named, tmp_path):
    with pytest.raises(PackingError, match=named):
        packed_trainer(tmp_path, untouchable(), **overrides)


@pytest.mark.parametrize(
    "peft_config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_adapters_that_act_once_per_row_are_refused(peft_config, tmp_path):
    with pytest.raises(PackingError, match=r"virtual tokens|alora_invocation_tokens"):
        PackedSFTTrainer(
            model=model_of(),
            args=PackedSFTConfig(**settings(tmp_path)),
            train_dataset=untouchable(),
            processing_class=byte_tokenizer(),
            peft_config=peft_config,
        )


def test_a_padding_collator_is_refused(tmp_path):
    args = PackedSFTConfig(**settings(tmp_path))
    with pytest.raises(PackingError, match="`data_collator` is a DataCollatorForLanguageModeling"):
        refuse_settings(args, None, DataCollatorForLanguageModeling(pad_token_id=0))
    refuse_settings(args, None, PackedCollator())


@pytest.mark.parametrize(
    ("sizes", "named"), [({"cp_size": 2}, "Context"), ({"sp_size": 2}, "Sequence"), ({"tp_size": 2}, "Tensor")]
)
def test_parallelism_along_the_sequence_is_refused(sizes, named):
    with pytest.raises(PackingError, match=f"{named} parallelism"):
        refuse_parallelism(ParallelismConfig(**sizes))
    refuse_parallelism(ParallelismConfig(dp_replicate_size=2))
    refuse_parallelism(None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"packing": True, "max_length": None}, "Set `token_budget`"),
        ({"packing": True, "max_length": 512, "token_budget": 256}, "holds only `token_budget` = 256"),
        ({"row_shape": "fixed"}, "`max_segments`"),
        ({"overlong": "cut"}, "`truncate`, `split`, `drop`, `error`, but it is 'cut'"),
        ({"token_budget": 0}, "at least 1"),
        ({"isolation_check": "warn"}, "`error`, `off`"),
    ],
)
def test_contradicting_settings_are_refused(overrides, message, tmp_path):
    with pytest.raises(PackingError, match=message):
        PackedSFTConfig(**settings(tmp_path, **overrides))


def test_a_leaking_model_stops_before_step_1(tmp_path):
    """OPT builds its mask without positions: packed samples see one another under sdpa."""
    trainer = packed_trainer(tmp_path, conversations(4), model=model_of("sdpa", "opt"), packing=True, max_steps=1)
    before = {name: param.clone() for name, param in trainer.model.named_parameters()}
    with pytest.raises(LeakError):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(param, before[name]) for name, param in trainer.model.named_parameters())


def test_the_proof_goes_into_the_log(tmp_path):
    trainer = packed_trainer(tmp_path, conversations(8), max_steps=2)
    trainer.train()
    first, second = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["isolation_max_leak"] == 0.0
    assert "isolation_max_leak" not in second


def test_without_the_check_the_run_says_so(tmp_path, capsys):
    trainer = packed_trainer(tmp_path, conversations(4), max_steps=1, isolation_check="off")
    trainer.train()
    assert "Isolation check: off" in capsys.readouterr().out


def test_the_check_changes_no_loss(tmp_path):
    from training import losses

    curves = []
    for check in ("error", "off"):
        trainer = packed_trainer(
            tmp_path,
            conversations(),
            lora=True,
            model=model_of(attention_dropout=0.1),
            max_steps=3,
            isolation_check=check,
        )
        trainer.train()
        curves.append(losses(trainer))
    assert curves[0] == curves[1]


def test_a_cache_switched_on_in_the_config_leaks_nothing(tmp_path):
    model = model_of()
    model.config.use_cache = True
    trainer = packed_trainer(tmp_path, conversations(4), model=model, packing=True, max_steps=1)
    trainer.train()
    assert trainer.isolation_report.ok


def test_a_decoder_that_trls_loss_cannot_find_is_refused(tmp_path):
    """Llama 4's text model: stock TRL stops in the first step, for a missing `last_hidden_state`."""
    model = model_of(model_type="llama4_text")
    with pytest.raises(PackingError, match="decoder of Llama4ForCausalLM under `language_model`"):
        packed_trainer(tmp_path, conversations(2), model=model)
    model.base_model_prefix = "model"
    trainer = packed_trainer(tmp_path, conversations(4), model=model, max_steps=1)
    trainer.train()
    assert trainer.isolation_report.ok


def test_attention_is_chosen_with_a_reason():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert choose_attention(config, "float32", torch.device("cpu"))[0] == "varlen"
    name, reason = choose_attention(config, "float32", torch.device("cuda"))
    assert name == "varlen"
    assert "half precision" in reason
    assert choose_attention(LlamaConfig(head_dim=512), "bfloat16", torch.device("cuda"))[0] == "varlen"


@pytest.mark.parametrize("model_type", sorted(set(WITHOUT_VARLEN) & set(TINY_TYPES)))
def test_models_that_need_a_dense_mask_get_one_and_are_refused_without(model_type, varlen):
    with pytest.raises(PackingError, match=r"ForC\w+ cannot run `varlen` attention: it"):
        check_model(tiny_model(model_type, attn_implementation=varlen), None)
    attention, reason = choose_attention(tiny_config(model_type), "float32", torch.device("cpu"))
    assert attention in ("sdpa", "eager")
    assert reason == WITHOUT_VARLEN[model_type]
    model = tiny_model(model_type, attn_implementation=attention)
    register_ops(model)
    report = check_isolation(model)
    assert report.ok, report.to_text()


def test_models_without_attention_backends_keep_their_own():
    from transformers import BloomConfig

    name, reason = choose_attention(BloomConfig(), "float32", torch.device("cpu"))
    assert name == "eager"
    assert "BloomForCausalLM" in reason


def test_compiling_rows_of_many_shapes_is_warned_of(tmp_path):
    args = PackedSFTConfig(**settings(tmp_path, packing=True))
    # Passed above, it would set the process's environment.
    args.torch_compile = True
    with pytest.warns(UserWarning, match="row_shape: fixed"):
        refuse_settings(args, None, None)
    args.row_shape = "fixed"
    refuse_settings(args, None, None)
