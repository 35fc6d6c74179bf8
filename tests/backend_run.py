"""
One rank of a run whose parameters are divided: trains a checkpoint as `options` say and writes what it saw as JSON.

`python -m torch.distributed.run --nproc-per-node 2 tests/backend_run.py OUT '{"backend": "native"}'`
"""

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch.distributed.tensor import DTensor, distribute_tensor
from training import as_dataset, conversations, losses, settings
from transformers import BitsAndBytesConfig

from trl_packing import LeakError, PackedSFTConfig, PackedSFTTrainer
from trl_packing.proof import isolation_line
from trl_packing.quickstart.tiny import byte_tokenizer

ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}


def shard_on_cpu() -> None:
    """Let accelerate use FSDP2 on a CPU. The stock one runs plain DDP for an FSDP config there, without a word."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    init = AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp


def backend_settings(backend: str) -> dict[str, Any]:
    if backend == "native":
        return {"model_init_kwargs": {"distributed_config": {"fsdp_size": 2}}}
    if backend.startswith("zero"):
        stage = int(backend[-1])
        return {"deepspeed": {**ZERO, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}}
    return {}


def adapters() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="auto")


def fix_adapters(model: torch.nn.Module) -> None:
    """The same adapters everywhere: launchers consume random numbers differently. B is not zero, so that A trains."""
    for name, param in model.named_parameters():
        if param.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = 0.1 * torch.randn(param.shape, generator=generator)
            if isinstance(param.data, DTensor):
                value = distribute_tensor(value, param.data.device_mesh, param.data.placements)
            param.data.copy_(value)


def sharded_share(trainer: Any) -> float:
    """Parameters of which this rank holds only a part, as a share of all."""
    divided = total = 0
    for param in trainer.model.parameters():
        size = getattr(param, "ds_numel", param.numel())
        local = param.to_local().numel() if isinstance(param, DTensor) else param.numel()
        local = param.ds_tensor.numel() if hasattr(param, "ds_tensor") else local
        total += size
        divided += size if local < size else 0
    return divided / total


def optimizer_share(trainer: Any) -> float:
    """Of the trained numbers, the share whose optimiser state this rank holds under ZeRO."""
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters() if p.requires_grad)
    partitions = getattr(trainer.deepspeed.optimizer, "single_partition_of_fp32_groups", None)
    partitions = trainer.deepspeed.optimizer.fp32_partitioned_groups_flat if partitions is None else partitions
    return float(sum(partition.numel() for partition in partitions) / trained)


def plant_leak(model: torch.nn.Module) -> None:
    """Let one attention layer read the whole row."""
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1.self_attn"))
    layer.register_forward_hook(lambda module, args, output: (output[0].cumsum(1), *output[1:]))


def write(out: str, trainer: Any, result: dict[str, Any]) -> None:
    result = {"world_size": trainer.accelerator.num_processes, **result}
    Path(out, f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))


def main(out: str, options: dict[str, Any]) -> None:
    backend, resume = options.pop("backend"), options.pop("resume", None)
    leaking_rank = options.pop("leaking_rank", None)
    checkpoint, dtype = options.pop("checkpoint", "model"), options.pop("dtype", "float32")
    quantization = options.pop("quantization", None)
    if backend == "fsdp2":
        shard_on_cpu()
    args = settings(out, packing=True, token_budget=300, **backend_settings(backend), **options)
    args["model_init_kwargs"] = {"dtype": dtype, **args.get("model_init_kwargs", {})}
    trainer = PackedSFTTrainer(
        model=str(Path(out).parent / checkpoint),
        args=PackedSFTConfig(ddp_timeout=120, **args),
        train_dataset=as_dataset(conversations(30)),
        processing_class=byte_tokenizer(),
        peft_config=adapters(),
        quantization_config=None if quantization is None else BitsAndBytesConfig(**quantization),
    )
    fix_adapters(trainer.model)
    if trainer.accelerator.process_index == leaking_rank:
        plant_leak(trainer.model)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except LeakError as error:
        write(out, trainer, {"leak": str(error)})
        return
    result = {
        "wrapped": type(trainer.model_wrapped).__name__,
        "losses": losses(trainer),
        "grad_norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "isolated": trainer.isolation_report.ok,
        "proof": isolation_line(trainer.isolation_report),
        "sharded": sharded_share(trainer),
        "optimizer": optimizer_share(trainer) if backend.startswith("zero") else None,
    }
    write(out, trainer, result)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Freeing gloo's group at the end of a process can hang, see `trl_packing.recipe.build._settle`.
    os._exit(0)
