"""What becomes of samples: cut, split, dropped, masked, and data that other collators get wrong."""

import pytest
from datasets import Dataset
from training import as_dataset, byte_tokenizer, conversations, losses, model_of, packed_trainer, settings
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTConfig, PackedSFTTrainer, PackingError, samples


def tokens(*lengths, labels=None):
    rows = []
    for number, length in enumerate(lengths):
        ids = [(number + place) % 100 + 3 for place in range(length)]
        rows.append({"input_ids": ids, "labels": ids if labels is None else labels[number]})
    return Dataset.from_list(rows)


def rows_of(trainer):
    return list(trainer.get_train_dataloader())


@pytest.mark.parametrize("packing", [True, False])
def test_overlong_samples_meet_their_fate_and_are_counted(packing, tmp_path):
    run = {"packing": packing, "max_length": 4096, "per_device_train_batch_size": 1}
    lengths = (10, 9000, 20)
    cut = packed_trainer(tmp_path, tokens(*lengths), **run).plan_report
    assert (cut.num_cut_samples, cut.num_cut_tokens, cut.num_trained_tokens) == (1, 4904, 4126)
    split = packed_trainer(tmp_path, tokens(*lengths), overlong="split", **run)
    assert split.plan_report.num_trained_tokens == 9030
    assert sorted(split._train_plan.for_epoch(0).lengths.tolist()) == [10, 20, 808, 4096, 4096]
    for row in rows_of(split):
        starts = row["cu_seq_lens_q"][:-1].long()
        assert (row["labels"][0, starts] == -100).all()
    dropped = packed_trainer(tmp_path, tokens(*lengths), overlong="drop", **run).plan_report
    assert (dropped.num_dropped_samples, dropped.num_dropped_tokens) == (1, 9000)
    with pytest.raises(PackingError, match="sample 1 has 9000"):
        packed_trainer(tmp_path, tokens(*lengths), overlong="error", **run)


def test_bfd_split_means_split(tmp_path):
    trainer = packed_trainer(
        tmp_path, tokens(10, 300), packing=True, packing_strategy="bfd_split", max_length=100, token_budget=100
    )
    assert trainer.plan_report.num_split_samples == 1
    assert trainer.plan_report.num_trained_tokens == 310


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.filterwarnings("ignore:The `'keep_end'`:FutureWarning")
def test_keep_end_is_honoured_under_packing(packing, tmp_path):
    data = tokens(50, 40, 60, labels=[[-100] * 40 + [7] * 10, [-100] * 30 + [8] * 10, [-100] * 45 + [9] * 15])
    run = {"max_length": 16, "truncation_mode": "keep_end", "max_steps": 1, "per_device_train_batch_size": 3}
    stock = SFTTrainer(
        model=model_of("sdpa"),
        args=SFTConfig(**settings(tmp_path, **run)),
        train_dataset=data,
        processing_class=byte_tokenizer(),
    )
    stock.train()
    ours = packed_trainer(tmp_path, data, packing=packing, **run)
    ours.train()
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    assert losses(ours)[0] > 1.0


@pytest.mark.parametrize("packing", [True, False])
def test_samples_without_a_trained_token_are_dropped_and_counted_in_every_mode(packing, tmp_path, capsys):
    labels = [[-100] * 5, [-100] * 9 + [5], [6] + [-100] * 3, [-100, 7]]
    trainer = packed_trainer(tmp_path, tokens(5, 10, 4, 2, labels=labels), packing=packing, max_length=8)
    assert trainer.plan_report.num_masked_samples == 3
    assert "masked" in capsys.readouterr().out
    (row,) = rows_of(trainer)
    assert row["labels"].tolist() == [[-100, 7]]


def test_a_set_with_nothing_to_train_on_is_refused(tmp_path):
    with pytest.raises(PackingError, match="trained label"):
        packed_trainer(tmp_path, tokens(3, 3, labels=[[-100] * 3] * 2), packing=True)


@pytest.mark.parametrize("packing", [True, False])
def test_packed_data_is_honoured_or_refused(packing, tmp_path):
    good = Dataset.from_list([{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], "seq_lengths": [1, 3]}] * 2)
    run = {"packing": packing, "per_device_train_batch_size": 2}
    (row,) = rows_of(packed_trainer(tmp_path, good, **run))
    assert row["cu_seq_lens_q"].tolist() == [0, 1, 4, 5, 8]
    wrong = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7], "seq_lengths": [1, 3]}])
    with pytest.raises(PackingError, match="`seq_lengths` of packed sample 0 add up to 4, but it has 3"):
        packed_trainer(tmp_path, wrong, **run)
    with pytest.raises(PackingError, match="packed already and cannot be cut"):
        packed_trainer(tmp_path, good, max_length=3, **run)


def test_holes_in_a_mask_are_refused_with_the_sample(tmp_path):
    data = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7], "attention_mask": [1, 0, 1]}])
    with pytest.raises(PackingError, match="`attention_mask` of sample 0 has zeros in between"):
        packed_trainer(tmp_path, data)


def test_labels_of_another_length_are_refused(tmp_path):
    data = Dataset.from_list([{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [5, 6], "labels": [5]}])
    with pytest.raises(PackingError, match="Sample 1"):
        packed_trainer(tmp_path, data)


def test_rows_read_from_a_shuffled_and_filtered_set_are_its_own(tmp_path):
    data = tokens(*range(2, 40)).shuffle(seed=1).filter(lambda sample: len(sample["input_ids"]) % 3)
    trainer = packed_trainer(tmp_path, data, packing=True, token_budget=64, max_length=64)
    rows = rows_of(trainer)
    seen = sorted(
        tuple(segment.tolist())
        for row in rows
        for segment in row["input_ids"][0].split(row["cu_seq_lens_q"].diff().tolist())
    )
    assert seen == sorted(tuple(sample["input_ids"]) for sample in data)


def test_alignment_stays_inside_the_budget_and_counts_nowhere(tmp_path):
    run = {"packing": True, "max_length": 100, "token_budget": 128, "num_train_epochs": 1}
    aligned = packed_trainer(tmp_path, conversations(12), pad_to_multiple_of=16, **run)
    assert all(row["input_ids"].shape[1] % 16 == 0 for row in rows_of(aligned))
    assert all(row["input_ids"].shape[1] <= 128 for row in rows_of(aligned))
    aligned.train()
    counted = [entry["num_tokens"] for entry in aligned.state.log_history if "loss" in entry][-1]
    assert counted == aligned.plan_report.num_trained_tokens


def test_tied_embeddings_with_trained_tokens_are_refused_in_one_sentence(tmp_path):
    """TRL's fused head fails on them with an AttributeError, after all preparation."""
    from peft import LoraConfig

    from trl_packing import PackedSFTConfig, PackedSFTTrainer

    with pytest.raises(PackingError, match="trainable_token_indices"):
        PackedSFTTrainer(
            model=model_of(tie_word_embeddings=True),
            args=PackedSFTConfig(**settings(tmp_path, packing=True)),
            train_dataset=as_dataset(conversations()),
            processing_class=byte_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[257, 258]),
        )


def test_pissa_trains_and_evaluates_the_same_model(tmp_path):
    from peft import LoraConfig

    from trl_packing import PackedSFTConfig, PackedSFTTrainer

    trainer = PackedSFTTrainer(
        model=model_of(),
        args=PackedSFTConfig(**settings(tmp_path, packing=True, token_budget=20_000, max_steps=1)),
        train_dataset=as_dataset(conversations()),
        eval_dataset=as_dataset(conversations()),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights="pissa"),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(before, rel=1e-5)


def test_a_plan_of_unmasked_data_reads_lengths_only(tmp_path, monkeypatch):
    import trl_packing.dataset as reading

    def refuse(*args):
        raise AssertionError("tokens were read")

    text = Dataset.from_list([{"text": "word " * number} for number in range(1, 9)])
    monkeypatch.setattr(reading, "_scan", refuse)
    trainer = packed_trainer(tmp_path, text, packing=True)
    assert trainer.plan_report.num_trained_samples == 8
    with pytest.raises(AssertionError, match="tokens were read"):
        packed_trainer(tmp_path, conversations(4), packing=True, assistant_only_loss=True)


def test_rows_leave_the_room_that_balancing_needs(tmp_path):
    run = {"packing": True, "max_length": 300, "token_budget": 1_000}
    skewed = tokens(*[*range(2, 60)] * 20, *[300] * 3)
    plan = packed_trainer(tmp_path, skewed, **run)._train_plan
    assert 0.0 < plan.headroom < 0.1
    assert max(plan.for_epoch(0).bin_tokens) <= 1_000 * (1 - plan.headroom)
    assert packed_trainer(tmp_path, tokens(*range(2, 60)), **run)._train_plan.headroom == 0.0
    assert packed_trainer(tmp_path, skewed, balance="tokens", **run)._train_plan.headroom == 0.0


def test_room_for_balancing_never_costs_a_row_that_samples_fill_exactly(tmp_path):
    exact = packed_trainer(tmp_path, tokens(*[16] * 400, *[64] * 10), packing=True, max_length=64, token_budget=128)
    assert exact._train_plan.headroom == 0.0
    assert exact.plan_report.num_rows == 55


TURN = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"messages": [TURN]}, {"messages": [{"role": "gpt", "content": "x"}]}], r"Sample 1 .*unknown role 'gpt'"),
        ([{"messages": [TURN], "text": "a"}, {"messages": None, "text": "b"}], "Sample 1 .*has no `messages` but"),
        ([{"messages": []}, {"messages": [TURN]}], "Sample 0 .*empty list"),
        ([{"text": "a"}, {"text": None}], "Sample 1 .*has no `text`"),
        ([{"body": "a"}], "`dataset_text_field`"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 entries in `input_ids` but 1 in `labels`"),
    ],
    ids=["role", "mixed", "empty", "missing", "columns", "lengths"],
)
@pytest.mark.parametrize("name", ["training", "evaluation", "evaluation (b)"])
def test_malformed_samples_are_named_before_the_model_is_loaded(data, message, name, tmp_path):
    good = Dataset.from_list([{"messages": [TURN]}])
    bad = Dataset.from_list(data)
    evaluation = {"training": None, "evaluation": bad, "evaluation (b)": {"a": good, "b": bad}}[name]
    with pytest.raises(PackingError, match=message) as refusal:
        PackedSFTTrainer(
            model="no/model",
            args=PackedSFTConfig(**settings(tmp_path)),
            train_dataset=bad if name == "training" else good,
            eval_dataset=evaluation,
        )
    assert f"The {name} set" in str(refusal.value) or f"of the {name} set" in str(refusal.value)


def test_a_formatting_function_takes_samples_of_any_kind(tmp_path):
    trainer = PackedSFTTrainer(
        model=model_of(),
        args=PackedSFTConfig(**settings(tmp_path)),
        train_dataset=Dataset.from_list([{"chat": [{"role": "gpt", "content": "x"}]}] * 3),
        processing_class=byte_tokenizer(),
        formatting_func=lambda sample: sample["chat"][0]["content"] * 5,
    )
    assert trainer._train_plan.samples.lengths.tolist() == [6, 6, 6]


def test_samples_that_the_recipe_has_checked_are_not_checked_twice(tmp_path, monkeypatch):
    data, args = Dataset.from_list(conversations(4)), PackedSFTConfig(**settings(tmp_path))
    calls = []
    monkeypatch.setattr(samples, "_check_all", lambda *args: calls.append(args))
    assert samples.validate_samples(data, args) is data
    packed_trainer(tmp_path, data)
    assert len(calls) == 1
    packed_trainer(tmp_path, data, assistant_only_loss=True)
    assert len(calls) == 2


READS_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}.{% endfor %}"
)
# Two of the ways in which published templates misread parts without an error.
PRINTS_PARTS = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}.{% endfor %}"
LOSES_PARTS = "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% endif %}.{% endfor %}"


def in_parts(*kinds):
    parts = [{"type": kind, "text": "yo" if kind == "text" else None} for kind in kinds]
    turns = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": parts}]
    return [{"messages": turns}] * 3


def template_trainer(folder, template, data):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    args = PackedSFTConfig(**settings(folder, packing=True, max_steps=1))
    return PackedSFTTrainer(model=model_of(), args=args, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("template", "shown"),
    [(None, "TypeError: can only concatenate"), (PRINTS_PARTS, "user:.*'type'"), (LOSES_PARTS, "'user:.assistant:.'")],
    ids=["raises", "prints", "loses"],
)
def test_a_template_that_misreads_parts_is_refused(template, shown, stream, tmp_path):
    data = as_dataset(in_parts("text", "text"))
    with pytest.raises(PackingError, match=rf"must render a turn in parts .* it makes .*{shown}"):
        template_trainer(tmp_path, template, data.to_iterable_dataset() if stream else data)


def test_a_template_that_reads_parts_gets_them(tmp_path):
    trainer = template_trainer(tmp_path, READS_PARTS, as_dataset(in_parts("text", "text")))
    text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])
    assert text == "user:hi.assistant:yoyo."


def test_a_completion_in_parts_is_rendered_after_its_prompt(tmp_path):
    """Many templates refuse turns that begin with the assistant's."""
    turns = in_parts("text")[0]["messages"]
    begins_with_user = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + READS_PARTS
    )
    data = as_dataset([{"prompt": turns[:1], "completion": turns[1:]}] * 3)
    trainer = template_trainer(tmp_path, begins_with_user, data)
    assert trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"]) == "user:hi.assistant:yo."


def test_pictures_for_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(PackingError, match="a turn's content has a part of type 'image'"):
        template_trainer(tmp_path, READS_PARTS, as_dataset(in_parts("text", "image")))
