"""What a recipe's data settings reach, and the one sentence for data that cannot be trained on (shared case 19)."""

import json
import random
import socket
import time

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from trl import DatasetMixtureConfig, SFTConfig

from trl_packing import PackingError, samples
from trl_packing.recipe.build import check_model_name
from trl_packing.recipe.config import RecipeArguments
from trl_packing.recipe.data import load_data
from trl_packing.samples import validate_samples

ASSISTANT, COMPLETION = {"assistant_only_loss": True}, {"completion_only_loss": True}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def settings(**changes):
    return SFTConfig(output_dir="out", use_cpu=True, bf16=False, **changes)


def load(name=None, *, mixture=None, splits=("train", "test"), config=None, stream=False, **changes):
    script = RecipeArguments(
        dataset_name=name if name is None else str(name),
        dataset_config=config,
        dataset_train_split=splits[0],
        dataset_test_split=splits[1],
        dataset_streaming=stream,
    )
    return load_data(script, DatasetMixtureConfig(**(mixture or {})), settings(**changes))


def refusal(*args, **kwargs):
    with pytest.raises(PackingError) as caught:
        load(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ---- every form of data loads


def write_json_array(path):
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=1))


def write_csv(path):
    path.write_text("text,other\na,1\nb,2\n")


WRITERS = {
    "a.jsonl": lambda path: lines(path, {"text": "a"}, {"text": "b"}),
    "a.json": write_json_array,
    "a.csv": write_csv,
    "a.tsv": lambda path: path.write_text("text\tother\na\t1\nb\t2\n"),
    "a.txt": lambda path: path.write_text("a\nb\n"),
    "a.parquet": lambda path: Dataset.from_dict({"text": ["a", "b"]}).to_parquet(path),
    "saved": lambda path: Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(path),
    "saved_splits": lambda path: DatasetDict(train=Dataset.from_dict({"text": ["a", "b"]})).save_to_disk(path),
    "folder": lambda path: lines(path / "train.jsonl", {"text": "a"}, {"text": "b"}),
}


@pytest.mark.parametrize("form", ["named", "streamed", "mixture", "streamed mixture"])
@pytest.mark.parametrize("name", list(WRITERS))
def test_every_local_form_loads(tmp_path, name, form):
    WRITERS[name](tmp_path / name)
    stream = form.startswith("streamed")
    if form.endswith("mixture"):
        train, evaluation = load(mixture={"datasets": [{"path": name}], "streaming": stream})
    else:
        train, evaluation = load(name, stream=stream)
    assert isinstance(train, datasets.IterableDataset if stream else Dataset)
    assert [sample["text"] for sample in train] == ["a", "b"]
    assert evaluation is None


def test_evaluation_set_comes_from_the_named_split(tmp_path):
    lines(tmp_path / "folder" / "train.jsonl", {"text": "a"})
    lines(tmp_path / "folder" / "test.jsonl", {"text": "b"})
    train, evaluation = load("folder", eval_strategy="steps", eval_steps=1)
    assert (train["text"][:], evaluation["text"][:]) == (["a"], ["b"])
    train, _ = load("folder", splits=("test", "train"))
    assert train["text"][:] == ["b"]


def test_mixtures_take_local_paths_slices_and_a_test_share(tmp_path):
    for name, writer in WRITERS.items():
        writer(tmp_path / name)
    # pandas gives the CSV loaders a text type of its own, which `datasets` does not mix with the others'.
    mixed = [name for name in WRITERS if name not in ("a.csv", "a.tsv")]
    entries = [{"path": name, "columns": ["text"]} for name in mixed] + [{"path": "saved", "split": "train[1:]"}]
    train, _ = load(mixture={"datasets": entries})
    assert train["text"][:] == ["a", "b"] * len(mixed) + ["b"]
    mixture = {"datasets": [{"path": "a.jsonl"}], "test_split_size": 0.5}
    train, evaluation = load(mixture=mixture, eval_strategy="epoch")
    assert (len(train), len(evaluation)) == (1, 1)


def test_every_rank_and_every_resumed_run_splits_alike(tmp_path):
    lines(tmp_path / "a.jsonl", *({"text": str(number)} for number in range(50)))
    held_out = []
    for state in (1, 2):
        np.random.seed(state)
        before = np.random.get_state()[1].tolist()
        mixture = {"datasets": [{"path": "a.jsonl"}], "test_split_size": 0.2}
        held_out.append(load(mixture=mixture, eval_strategy="epoch", seed=7)[1]["text"][:])
        assert np.random.get_state()[1].tolist() == before
    assert held_out[0] == held_out[1]
    assert load(mixture=mixture, eval_strategy="epoch", seed=8)[1]["text"][:] != held_out[0]


def test_a_configuration_of_a_local_folder_is_used(tmp_path):
    lines(tmp_path / "folder" / "one.jsonl", {"text": "one"})
    lines(tmp_path / "folder" / "two.jsonl", {"text": "two"})
    one, two = ("- {config_name: NAME, data_files: NAME.jsonl}\n".replace("NAME", name) for name in ("one", "two"))
    (tmp_path / "folder" / "README.md").write_text(f"---\nconfigs:\n{one}{two}---\n")
    assert load("folder", config="two")[0]["text"][:] == ["two"]
    message = refusal("folder", config="three")
    assert "three" in message


def test_one_sample_emoji_null_bytes_and_a_long_line_arrive_whole(tmp_path):
    text = "a\x00b 😀 \u2028 é" + "x" * 2_000_000
    lines(tmp_path / "long.jsonl", {"text": text})
    assert load("long.jsonl")[0]["text"][:] == [text]
    (tmp_path / "raw.txt").write_bytes("a\x00b 😀\n".encode())
    assert load("raw.txt")[0]["text"][:] == ["a\x00b 😀"]


# ---- files, names and splits


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["is empty"]),
        (b"\n \n", ["only blank lines"]),
        (b'{"text": "a"}\n{oops\n', ["line 2 is not JSON"]),
        (b'{"text": "a"}\n\n{"text": "b"', ["line 3 is not JSON"]),
        (b'{"text": "a"}\n"b"\n', ["line 2 is a str"]),
        (b'{"text": "a"}\n[1]\n', ["line 2 is a list"]),
        (b'{"text": "a"}\n{"text": "\\ud83d"}\n', ["line 2", "surrogate"]),
        (b'{"text": "a"}\n{"text": "caf\xe9"}\n', ["line 2", "utf-8"]),
        (b'{"text": "a\x00b"}\n', ["line 1"]),
        (b'{"text": "a", "text": "b"}\n', ["line 1", "twice"]),
        (b'[{"text": "a"},\n{"text": }]', ["is not JSON", "line 2"]),
    ],
)
def test_json_that_cannot_be_read_names_the_line(tmp_path, content, parts):
    (tmp_path / "bad.jsonl").write_bytes(content)
    for mixture in (None, {"datasets": [{"path": "bad.jsonl"}]}):
        message = refusal(None if mixture else "bad.jsonl", mixture=mixture)
        assert all(part in message for part in ["bad.jsonl", *parts]), message


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"text\n", "holds no samples"),
        ("a.csv", b"a,b\n1,2\n1,2,3,4\n", "line 3"),
        ("a.parquet", b"nope", "cannot be loaded"),
        ("a.txt", b"caf\xe9\n", "utf-8"),
        ("a.bin", b"x", ".jsonl, .ndjson"),
    ],
)
def test_other_files_that_cannot_be_read_are_named(tmp_path, name, content, part):
    (tmp_path / name).write_bytes(content)
    message = refusal(name)
    assert name in message
    assert part in message


def test_a_folder_of_two_kinds_is_refused_because_one_would_be_left_out(tmp_path):
    lines(tmp_path / "both" / "a.jsonl", {"text": "a"})
    (tmp_path / "both" / "b.csv").write_text("text\nb\n")
    message = refusal("both")
    assert "a.jsonl" in message
    assert "b.csv" in message
    (tmp_path / "none").mkdir()
    assert "no data file" in refusal("none")


@pytest.mark.parametrize(
    "card", [None, "# Notes\n", "---\nconfigs:\n- config_name: default\n  data_files: train.jsonl\n---\n"]
)
def test_a_folder_whose_files_change_is_read_again(card, tmp_path, caplog):
    file = lines(tmp_path / "folder" / "train.jsonl", {"text": "a"})
    if card is not None:
        (tmp_path / "folder" / "README.md").write_text(card)
    assert load("folder")[0]["text"] == ["a"]
    lines(file, {"text": "b"}, {"text": "c"})
    assert load("folder")[0]["text"] == ["b", "c"]
    # `datasets:` loads through TRL, which has no way to say it.
    load(mixture={"datasets": [{"path": "folder"}]})
    assert ("even if its files change" in caplog.text) == ("configs:" in (card or ""))


@pytest.mark.parametrize("name", ["gone.jsonl", "./gone", "a/b/c", "~/gone-folder"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name):
    assert f"{name!r} in `dataset_name` does not exist" in refusal(name)
    assert f"{name!r} in `datasets` does not exist" in refusal(mixture={"datasets": [{"path": name}]})


@pytest.fixture
def unreachable_hub(monkeypatch):
    """A hub at a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{probe.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield


def test_a_hub_that_does_not_answer_is_asked_once(unreachable_hub):
    start = time.perf_counter()
    with pytest.raises(PackingError, match=r"`dataset_name: some/data`.* 127.0.0.1 cannot be reached.*HF_HUB_OFFLINE"):
        load("some/data")
    with pytest.raises(PackingError, match=r"`model_name_or_path: some/model`.*HF_HUB_OFFLINE"):
        check_model_name("some/model")
    assert time.perf_counter() - start < 10


def test_a_proxy_may_reach_the_hub(unreachable_hub, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    check_model_name("some/model")


def test_a_hub_id_while_offline_is_one_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for message in (refusal("some/set"), refusal(mixture={"datasets": [{"path": "some/set"}]})):
        assert "some/set" in message
        assert "the hub cannot be reached" in message


def test_a_missing_split_lists_the_splits(tmp_path):
    lines(tmp_path / "folder" / "train.jsonl", {"text": "a"})
    lines(tmp_path / "folder" / "validation.jsonl", {"text": "b"})
    assert "only: train, validation" in refusal("folder", splits=("trian", "test"))
    message = refusal("folder", eval_strategy="steps", eval_steps=1)
    assert "`dataset_test_split` is 'test'" in message
    assert "only: train, validation" in message
    DatasetDict(train=Dataset.from_dict({"text": ["a"]})).save_to_disk(tmp_path / "saved")
    assert "Its splits: train" in refusal(mixture={"datasets": [{"path": "saved", "split": "valid"}]})


@pytest.mark.parametrize(
    ("mixture", "part"),
    [
        ({"datasets": [{"path": "a.jsonl", "fraction": 0.5}, {"path": "a.jsonl"}]}, "`fraction`"),
        ({"datasets": [{"path": "a.jsonl", "columns": ["mesages"]}]}, "mesages"),
        ({"datasets": [{"path": "a.jsonl"}], "streaming": True, "test_split_size": 0.5}, "`test_split_size`"),
        ({}, "neither `dataset_name` nor `datasets`"),
    ],
)
def test_a_wrong_mixture_is_one_sentence(tmp_path, mixture, part):
    lines(tmp_path / "a.jsonl", {"text": "a"})
    assert part in refusal(mixture=mixture)


# ---- samples


def turns(*roles, **extra):
    return [{"role": role, "content": "x", **extra} for role in roles]


@pytest.mark.parametrize(
    ("rows", "changes", "parts"),
    [
        ([{"a": 1, "b": 2}], {}, ["a, b", "`messages`", "`prompt` and `completion`", "`text`", "`conversations`"]),
        ([{"prompt": "a"}], {}, ["prompt", "`completion`"]),
        ([{"text": 5}], {}, ["Sample 0", "`text`", "int '5'"]),
        ([{"text": "a"}, {"text": 5}], {}, ["Sample 1", "int '5'"]),
        ([{"text": "a"}, {"text": None}], {}, ["Sample 1", "no `text`"]),
        ([{"messages": "hello"}], {}, ["Sample 0", "list of turns", "'hello'"]),
        ([{"messages": CHAT}, {"messages": []}], {}, ["Sample 1", "empty list"]),
        ([{"messages": ["hello"]}], {}, ["turn 0", "'hello'"]),
        ([{"messages": CHAT}, {"text": "a"}], {}, ["Sample 1", "no `messages` but has `text`"]),
        ([{"messages": CHAT}, {"messages": turns("user", "asistant")}], {}, ["Sample 1", "'asistant'", "turn 1"]),
        ([{"conversations": [{"from": "human", "value": "x"}]}], {}, ["'human'", "Rename it to 'user'"]),
        ([{"conversations": CHAT}], {}, ["no `from`", "role, content"]),
        ([{"messages": [{"role": "user"}]}], {}, ["no `content` in turn 0"]),
        ([{"messages": [{"role": "user", "content": 3}]}], {}, ["`content` of turn 0", "int '3'"]),
        ([{"prompt": "a", "completion": turns("assistant")}], {}, ["text in one of"]),
        ([{"messages": CHAT}, {"messages": turns("user")}], ASSISTANT, ["1", "no assistant"]),
        ([{"prompt": CHAT, "completion": turns("user")}], ASSISTANT, ["no assistant", "`completion`"]),
        ([{"prompt": "a", "completion": "b"}], ASSISTANT, ["not a conversation"]),
        ([{"text": "a"}], ASSISTANT, ["`assistant_only_loss` needs conversations"]),
        ([{"messages": CHAT}], COMPLETION, ["`completion_only_loss` needs", "`assistant_only_loss"]),
        ([{"input_ids": [1, 2]}, {"input_ids": []}], {}, ["Sample 1", "no token"]),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, ["2 entries", "1 in `labels`"]),
        ([{"input_ids": "text"}], {}, ["list of integers", "'text'"]),
        ([{"body": 5}], {"dataset_text_field": "body"}, ["`body`"]),
    ],
)  # fmt: skip
def test_a_malformed_sample_is_named(tmp_path, rows, changes, parts):
    lines(tmp_path / "rows.jsonl", *rows)
    for stream in (False, True):
        message = refusal("rows.jsonl", stream=stream, **changes)
        assert all(part in message for part in parts), message


TOOLS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([{"messages": TOOLS}, {"messages": CHAT}], ASSISTANT),
        ([{"messages": turns("system", "developer", "user", "assistant", "tool")}], {}),
        ([{"messages": turns("user")}], {}),
        ([{"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]}], {}),
        ([{"conversations": [{"from": "user", "value": "x"}]}], {}),
        ([{"prompt": CHAT[:1], "completion": CHAT[1:]}], ASSISTANT),
        ([{"prompt": CHAT, "completion": turns("user")}], {**ASSISTANT, "completion_only_loss": False}),
        ([{"prompt": "a", "completion": ""}], COMPLETION),
        ([{"text": ""}], {}),
        ([{"input_ids": [1, 2], "labels": [-100, 2], "completion_mask": [0, 1]}], {}),
    ],
)  # fmt: skip
def test_what_trl_trains_on_passes_unchanged(tmp_path, rows, changes):
    lines(tmp_path / "rows.jsonl", *rows)
    for stream in (False, True):
        train, _ = load("rows.jsonl", stream=stream, **changes)
        kept = [{key: value for key, value in sample.items() if value is not None} for sample in train]
        assert [list(sample) for sample in kept] == [list(row) for row in rows]
        assert len(kept) == len(rows)


def test_a_prompt_column_without_completion_is_left_out_of_conversations(caplog):
    dataset = Dataset.from_list([{"prompt": "Hi", "messages": CHAT}])
    assert validate_samples(dataset, settings()).column_names == ["messages"]
    assert "`prompt`" in caplog.text


def test_conversations_are_converted_where_trl_would_not_see_them():
    rows = [{"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]}]
    checked = validate_samples(Dataset.from_list(rows), settings(assistant_only_loss=True))
    expected = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert checked[0] == {"messages": expected}


def test_an_empty_set_is_refused():
    with pytest.raises(PackingError, match="evaluation set holds no samples"):
        validate_samples(Dataset.from_dict({"text": []}), settings(), name="evaluation")


def random_turns(rng):
    roles = ["user", "assistant", "system", "user", "assistant", "asistant"][: 5 if rng.random() < 0.9 else 6]
    return [
        {"role": rng.choice(roles), "content": None if rng.random() < 0.02 else "x"}
        for _ in range(rng.choice([0, 1, 2, 3, 4] if rng.random() < 0.1 else [1, 2, 3, 4]))
    ]


@pytest.mark.parametrize("needs", [None, "any", "completion"])
def test_the_fast_form_accepts_only_what_the_plain_definition_accepts(needs):
    rng = random.Random(0)
    columns = ("prompt", "completion") if needs == "completion" else ("messages",)
    rules = samples._Rules(columns, needs_assistant=needs)
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    num_accepted = 0
    for _ in range(400):
        rows = [{column: random_turns(rng) for column in columns} for _ in range(rng.randint(1, 3))]
        table = pa.table({column: pa.array([row[column] for row in rows], kind) for column in columns})
        # Slices share the buffers of their parent, so the offsets do not start at 0.
        first = rng.randint(0, len(rows) - 1)
        batch = table.slice(first).combine_chunks().to_batches()[0]
        plain = all(samples._complaint(row, rules) is None for row in rows[first:])
        assert samples._surely_right(batch, rules) == plain
        num_accepted += plain
    assert 40 < num_accepted < 360


def test_a_shuffled_set_is_checked_by_the_numbers_a_user_sees():
    good, bad = {"messages": CHAT}, {"messages": turns("asistant")}
    dataset = Dataset.from_list([bad, *[good] * 2_500]).select([*range(1, 2_200), 0, 2_300])
    with pytest.raises(PackingError, match="Sample 2199 of the training set"):
        validate_samples(dataset, settings())
