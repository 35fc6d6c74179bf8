"""
Tiny models and a byte-level tokenizer, built in code: whole runs and tests without any download.

Each model is random and has 0.2 to 0.4 million parameters. A hybrid has each of its layer kinds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from ..errors import PackingError
from .cache import build_once, cache_folder

# The markers tell TRL which tokens the assistant wrote, for `assistant_only_loss`.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else -%}
{{ message['content'] + '<|im_end|>' }}
{%- endif -%}
{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """
    Build a tokenizer with one token per UTF-8 byte and a ChatML template.

    Returns:
        `PreTrainedTokenizerFast`: 259 tokens: bytes 0 to 255 as ids 0 to 255, then `<|pad|>`, `<|im_start|>` and
            `<|im_end|>` (the eos token). Text that spells a special token becomes that token, as everywhere.

    Example:

    ```python
    >>> from trl_packing.quickstart.tiny import byte_tokenizer
    >>> byte_tokenizer()("Hi!").input_ids
    [72, 105, 33]

    ```
    """
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
    )


def tiny_config(architecture: str = "llama") -> PreTrainedConfig:
    """
    Give the configuration of a tiny model that fits the byte-level tokenizer.

    Args:
        architecture (`str`, *optional*, defaults to `"llama"`):
            `"llama"`; `"qwen3_next"` (Gated DeltaNet, attention, 4 experts); `"qwen3_5"` (Gated DeltaNet, attention,
            the text model); `"bamba"` (Mamba-2, attention).

    Returns:
        `PreTrainedConfig`: Head sizes and channel counts are ones that the CUDA kernels take.

    Raises:
        [`PackingError`]: If the architecture is not in the list.
    """
    if architecture not in _ARCHITECTURES:
        raise PackingError(
            f"Tiny models exist for {', '.join(_ARCHITECTURES)}, but `architecture` is {architecture!r}. Pass one of "
            "these."
        )
    return _ARCHITECTURES[architecture]()


def build_tiny(folder: str | Path, architecture: str = "llama", seed: int = 0) -> Path:
    """
    Save a tiny random model and its tokenizer.

    Args:
        folder (`str` or `Path`):
            Where both go. Created if missing; files of the same names are replaced.
        architecture (`str`, *optional*, defaults to `"llama"`):
            One of the names that [`tiny_config`] takes.
        seed (`int`, *optional*, defaults to `0`):
            Of the weights. The caller's random state is left as it was.

    Returns:
        `Path`: `folder`, which `from_pretrained` of `AutoModelForCausalLM` and `AutoTokenizer` reads. Weights are
            float32.

    Raises:
        [`PackingError`]: If the architecture is not in the list.
    """
    config = tiny_config(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return Path(folder)


def ensure_tiny(architecture: str = "llama") -> Path:
    """
    Give the folder of a tiny model in the cache, building it the first time.

    Args:
        architecture (`str`, *optional*, defaults to `"llama"`):
            One of the names that [`tiny_config`] takes.

    Returns:
        `Path`: A folder as [`build_tiny`] makes it. It stays, so that a saved adapter finds its base model again.

    Raises:
        [`PackingError`]: If the architecture is not in the list, or the cache can't be written.
    """
    tiny_config(architecture)
    # Saved files depend on this module and on the spelling of the installed transformers.
    state = hashlib.sha256(Path(__file__).read_bytes() + transformers.__version__.encode()).hexdigest()[:8]
    folder = cache_folder() / f"tiny-{architecture.replace('_', '-')}-{state}"
    return build_once(folder, lambda partial: build_tiny(partial, architecture))


def _byte_characters() -> list[str]:
    # The characters in which `ByteLevel` spells bytes: printable Latin-1 as itself, the rest from code point 256 on.
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def _common(**sizes: Any) -> dict[str, Any]:
    return {
        "vocab_size": NUM_BYTES + len(SPECIAL_TOKENS),
        "pad_token_id": NUM_BYTES,
        "bos_token_id": None,
        "eos_token_id": NUM_BYTES + 2,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # Wide enough that a leak between segments is far above rounding.
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        **sizes,
    }


def _gated_delta_net(**sizes: Any) -> dict[str, Any]:
    return _common(
        hidden_size=64,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        **sizes,
    )


def _llama() -> PreTrainedConfig:
    return transformers.LlamaConfig(**_common(hidden_size=96, intermediate_size=256, num_hidden_layers=3))


def _qwen3_next() -> PreTrainedConfig:
    return transformers.Qwen3NextConfig(
        **_gated_delta_net(
            intermediate_size=128,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            decoder_sparse_step=1,
        )
    )


def _qwen3_5() -> PreTrainedConfig:
    return transformers.Qwen3_5TextConfig(**_gated_delta_net(intermediate_size=128))


def _bamba() -> PreTrainedConfig:
    return transformers.BambaConfig(
        **_common(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            attn_layer_indices=[2],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=32,
        )
    )


_ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "bamba": _bamba,
}
