"""
Ask a trained model about an invented fact, before and after.

`python -m trl_packing.quickstart.probe runs/quickstart` reloads what a run saved and asks with the adapter off and on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PackingError
from . import PROBE_KEYWORD, PROBE_QUESTION

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def answer(
    model: PreTrainedModel | Any, tokenizer: PreTrainedTokenizerBase | Any, question: str, *, max_new_tokens: int = 32
) -> str:
    """
    Let a chat model answer one question, always with its most likely token.

    Args:
        model (`PreTrainedModel`):
            A causal language model. Its training mode and its cache setting are left as they were.
        tokenizer (`PreTrainedTokenizerBase`):
            With a chat template.
        question (`str`):
            The user's message.
        max_new_tokens (`int`, *optional*, defaults to `32`):
            Most tokens of the answer.

    Returns:
        `str`: The answer's text, without special tokens.
    """
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    was_training = model.training
    model.eval()
    try:
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    finally:
        model.train(was_training)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def ask_before_and_after(folder: str | Path, question: str = PROBE_QUESTION) -> tuple[str, str]:
    """
    Reload a saved adapter and ask its base model a question without and with it.

    Args:
        folder (`str` or `Path`):
            What a LoRA run saved: adapter and tokenizer.
        question (`str`, *optional*):
            The default asks for an invented fact of `quickstart/conversations`.

    Returns:
        `tuple[str, str]`: The answers with the adapter off and on.

    Raises:
        [`PackingError`]: If the folder holds no adapter.
    """
    if not (Path(folder) / "adapter_config.json").is_file():
        raise PackingError(
            f"The question needs a saved adapter, but {folder} has no `adapter_config.json`. Train one first, with "
            "`--config quickstart`."
        )
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with model.disable_adapter():
        before = answer(model, tokenizer, question)
    return before, answer(model, tokenizer, question)


def main(argv: list[str] | None = None) -> int:
    """
    Print the question and both answers.

    Args:
        argv (`list[str]`, *optional*):
            The folder of the adapter. The default is `sys.argv[1:]`.

    Returns:
        `int`: 0 if only the trained model knows the fact, 1 if not, 2 if there is nothing to ask.
    """
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1:
        print("usage: python -m trl_packing.quickstart.probe FOLDER", file=sys.stderr)
        return 2
    try:
        before, after = ask_before_and_after(argv[0])
    except PackingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Question: {PROBE_QUESTION}\nBefore:   {before}\nAfter:    {after}")
    return 0 if PROBE_KEYWORD in after and PROBE_KEYWORD not in before else 1


if __name__ == "__main__":
    sys.exit(main())
