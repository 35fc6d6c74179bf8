"""Launch options in a YAML, adapters from `lora_config`, and how a refusal leaves the program."""

import pytest
from accelerate.commands.launch import launch_command_parser
from peft import LoraConfig
from trl import DatasetMixtureConfig, ModelConfig, SFTConfig, get_peft_config

from trl_packing import MissingDependencyError, PackingError, UnsupportedVersionError
from trl_packing.recipe.config import RecipeArguments, RecipeParser, build_lora, parse_recipe, usage_errors

TYPES = (RecipeArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)


@pytest.fixture
def write(tmp_path):
    def run(text):
        path = tmp_path / "run.yaml"
        path.write_text("use_cpu: true\nbf16: false\n" + text)
        return ["--config", str(path)]

    return run


# ---- launch options


def test_launch_options_are_accepted_reported_and_usable_by_the_launcher(write, capsys):
    text = (
        "num_processes: 2\nmulti_gpu: true\nuse_fsdp: false\nmixed_precision: bf16\naccelerate_config: zero3\nseed: 5"
    )
    _, training, _, _, launch = parse_recipe(write(text), dataclass_types=TYPES)
    assert training.seed == 5
    assert launch.options == {
        "num_processes": 2,
        "multi_gpu": True,
        "use_fsdp": False,
        "mixed_precision": "bf16",
        "accelerate_config": "zero3",
    }
    said = capsys.readouterr().err
    assert all(f"`{key}: {value}`" in said for key, value in launch.options.items())
    assert "no effect" in said
    launch.options.pop("accelerate_config")
    known = launch_command_parser().parse_args([*launch.to_argv(), "script.py"])
    assert (known.num_processes, known.multi_gpu, known.use_fsdp, known.mixed_precision) == (2, True, False, "bf16")


def test_the_parser_keeps_the_contract_of_trl_launcher_command(write):
    words = [*write("num_processes: 2\nseed: 5"), "--main_process_port", "0"]
    *parsed, from_yaml, from_words = RecipeParser(TYPES, prog="x").parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (from_yaml, from_words) == (["--num_processes", "2"], ["--main_process_port", "0"])
    assert parsed[1].seed == 5


# ---- adapters


def test_lora_config_reaches_all_of_peft_and_wins():
    model = ModelConfig(lora_r=8, lora_alpha=4, lora_target_modules=["q_proj", "v_proj"])
    built = build_lora(
        model,
        {
            "r": 2,
            "exclude_modules": ["x"],
            "bias": "lora_only",
            "rank_pattern": {"q_proj": 1},
            "layers_to_transform": [0],
            "init_lora_weights": "eva",
            "eva_config": {"rho": 3.0},
        },
    )
    assert (built.r, built.lora_alpha, built.bias, built.rank_pattern) == (2, 4, "lora_only", {"q_proj": 1})
    assert (built.target_modules, built.exclude_modules) == ({"q_proj", "v_proj"}, {"x"})
    assert built.eva_config.rho == 3.0
    assert build_lora(model, {"init_lora_weights": "pissa_niter_4"}).init_lora_weights == "pissa_niter_4"
    assert model.use_peft is False


@pytest.mark.parametrize(
    ("written", "targets"),
    [
        ("[q_proj]", {"q_proj"}),
        ("q_proj", {"q_proj"}),
        ("[mixer.in_proj]", {"mixer.in_proj"}),
        ("[q_proj, v_proj]", {"q_proj", "v_proj"}),
        ("auto", "auto"),
        ("all-linear", "all-linear"),
        ("[all-linear]", "all-linear"),
        (r"'.*\.q_proj'", r".*\.q_proj"),
    ],
)
def test_one_target_is_a_name_and_not_a_pattern(written, targets, write):
    """TRL makes a text of a list of one, and PEFT takes a text for a pattern over whole names: no module matches."""
    _, _, model, _, _ = parse_recipe(write(f"use_peft: true\nlora_target_modules: {written}"), dataclass_types=TYPES)
    assert build_lora(model).target_modules == targets


def test_adapters_are_off_without_and_trl_own_with_use_peft_alone():
    assert build_lora(ModelConfig()) is None
    model = ModelConfig(use_peft=True, lora_r=4)
    assert build_lora(model) == get_peft_config(model)
    assert build_lora(ModelConfig(), {}) == get_peft_config(ModelConfig(use_peft=True))
    assert isinstance(build_lora(ModelConfig(), {"r": 1}), LoraConfig)


@pytest.mark.parametrize(
    ("lora_config", "parts"),
    [
        ({"excluded_modules": ["a"]}, ["`excluded_modules`", "`exclude_modules`"]),
        ({"lora_r": 8}, ["`r`", "`lora_r`"]),
        ({"bias": "most"}, ["none, all, lora_only", "'most'"]),
        ({"r": "eight"}, ["`r` takes a whole number"]),
        ({"r": 0}, ["at least 1"]),
        ({"eva_config": {"roh": 1}}, ["`roh`", "`rho`"]),
        ({"target_parameters": ["experts.down_proj"]}, ["`lora_dropout` is 0.05"]),
        ({"target_modules": "a.*", "layers_to_transform": [1]}, ["PEFT refuses", "`layers_to_transform`"]),
    ],
)
def test_a_wrong_adapter_setting_is_one_sentence(lora_config, parts):
    with pytest.raises(PackingError) as caught:
        build_lora(ModelConfig(), lora_config)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


# ---- how refusals leave the program


@pytest.mark.parametrize("error", [PackingError, MissingDependencyError, UnsupportedVersionError])
def test_refusals_are_one_line_and_exit_code_2(capsys, error, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as caught, usage_errors("prog"):
        raise error("first\nsecond")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "prog: first second\n"


def test_other_errors_keep_their_traceback():
    @usage_errors()
    def broken():
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        broken()
