"""What is installed on this machine, what is missing, and the line that installs it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import import_module

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .. import _compat

OK, MISSING, UNNEEDED, BROKEN, UNFIT = "ok", "missing", "unneeded", "broken", "unfit"

# Distribution, module to import, what to install, and whether only GPUs have a use for it.
_OPTIONAL = (
    ("flash-attn", "flash_attn", "'trl-packing[flash]'", True),
    ("flash-linear-attention", "fla", "'trl-packing[gdn]'", True),
    ("causal-conv1d", "causal_conv1d", "'trl-packing[gdn]'", True),
    ("mamba-ssm", "mamba_ssm", "'trl-packing[mamba]'", True),
    ("deepspeed", "deepspeed", "'trl-packing[deepspeed]'", False),
    ("bitsandbytes", "bitsandbytes", "'trl-packing[quantization]'", False),
    ("matplotlib", "matplotlib", "'trl-packing[plots]'", False),
)
# Of these, any version that pip accepts beside ours will do.
_UNBOUNDED = ("peft", "accelerate", "datasets")


@dataclass(frozen=True)
class Entry:
    """
    One line of the table.

    Args:
        name (`str`):
            Package, or property of the machine.
        found (`str`):
            Version or value; `"missing"` where there is none.
        status (`str`):
            `"ok"`; `"missing"`; `"unneeded"`: missing, and of use on a GPU only; `"broken"`: installed, but cannot be
            imported; `"unfit"`: a version that cannot be used.
        note (`str`):
            What there is to know.
        install (`str`):
            For everything that is not ok, the command that makes it so.
        required (`bool`):
            Whether nothing works without it.
    """

    name: str
    found: str
    status: str = OK
    note: str = ""
    install: str = ""
    required: bool = False


def read_environment() -> list[Entry]:
    """
    Look at this machine. Optional packages that are installed are imported, to see whether they work.

    Returns:
        `list[Entry]`: Interpreter, required packages, device, optional packages.
    """
    entries = [Entry("python", platform.python_version())]
    entries += [_required(name, bounds) for name, bounds in reversed(_compat.REQUIRED.items())]
    entries += [_required(name, "") for name in _UNBOUNDED]
    torch_works = next(entry for entry in entries if entry.name == "torch").status != MISSING
    has_gpu = torch_works and _has_gpu()
    if torch_works:
        entries += _device()
    entries.append(_kernels())
    entries += [_optional(*package, has_gpu=has_gpu) for package in _OPTIONAL]
    return entries


def _required(name: str, bounds: str) -> Entry:
    found = _compat.installed_version(name)
    install = f"pip install '{name}{bounds}'"
    if found is None:
        return Entry(name, MISSING, MISSING, install=install, required=True)
    if not SpecifierSet(bounds).contains(Version(found).base_version):
        return Entry(name, found, UNFIT, f"{name}{bounds} is needed", install, required=True)
    return Entry(name, found, required=True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _device() -> list[Entry]:
    import torch

    if not torch.cuda.is_available():
        kind = "mps" if torch.backends.mps.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        return [Entry("device", kind, note=f"{reason}; threads: {torch.get_num_threads()}")]
    gpu = torch.cuda.get_device_properties(0)
    number = torch.cuda.device_count()
    memory = f"{gpu.total_memory / 2**30:.0f} GiB"
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    half = "has bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "has no bfloat16"
    return [
        Entry("device", "cuda", note=f"{f'{number} x ' if number > 1 else ''}{gpu.name}, {memory}, {runtime}"),
        Entry("capability", f"{gpu.major}.{gpu.minor}", note=half),
    ]


def _kernels() -> Entry:
    found = _compat.installed_version("kernels")
    usable, sentence = _compat.kernels_usable()
    if usable:
        return Entry("kernels", str(found), note="fits the installed transformers")
    reason = sentence.partition(". `pip")[0].replace("`", "")
    install = f"pip install '{_compat.DISTRIBUTION}[kernels]'"
    return Entry("kernels", found or MISSING, UNFIT if found else MISSING, reason, install)


def _optional(name: str, module: str, source: str, for_gpu: bool, *, has_gpu: bool) -> Entry:
    found = _compat.installed_version(name) or "?"
    if not _compat.is_available(module):
        return Entry(name, MISSING, UNNEEDED if for_gpu and not has_gpu else MISSING, install=f"pip install {source}")
    try:
        import_module(module)
    # Compiled packages fail in many ways on another torch, driver or machine.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        # With its dependencies the extra would replace torch as well.
        install = f"pip install --force-reinstall --no-deps {name}"
        return Entry(name, found, BROKEN, f"cannot be imported: {reason[:160]}", install)
    return Entry(name, found)
