"""
One rank of a distributed test, started by torchrun: trains as `options` say and writes what it saw as JSON.

`python -m torch.distributed.run --nproc-per-node 2 tests/distributed_run.py OUT '{"packing": true}'`
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from training import Gradients, as_dataset, conversations, losses, model_of, packed_trainer


def main(out: str, options: dict) -> None:
    number = options.pop("num_samples", 30)
    evaluate_first = options.pop("evaluate_first", False)
    streaming = options.pop("streaming", 0)
    empty_shard = options.pop("empty_shard", False)
    resume = options.pop("resume", None)
    kill_in_save = options.pop("kill_in_save", 0)
    kill_in_step = options.pop("kill_in_step", 0)
    eval_streaming = options.pop("eval_streaming", False)
    data = as_dataset(conversations(number))
    if streaming:
        data = data.to_iterable_dataset(num_shards=streaming)
        if empty_shard:
            data = data.filter(lambda sample, index: index >= number // streaming, with_indices=True)
    eval_data = as_dataset(conversations(9, seed=2))
    if eval_streaming:
        eval_data = eval_data.to_iterable_dataset()
    gradients, seen = Gradients(), []
    trainer = packed_trainer(
        out,
        data,
        model=model_of(model_type=options.pop("model_type", "llama")),
        lora=options.pop("lora", False),
        eval_data=eval_data,
        callbacks=[gradients],
        ddp_timeout=120,
        **options,
    )
    if kill_in_save:
        save_rng_state = trainer._save_rng_state

        def killed(folder):
            save_rng_state(folder)
            if trainer.state.global_step == kill_in_save:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer._save_rng_state = killed
    if evaluate_first:
        trainer.evaluate()
    compute_loss = trainer.compute_loss

    def recording(model, inputs, *args, **kwargs):
        if kill_in_step == trainer.state.global_step + 1 and trainer.accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.model.training:
            seen.append(list(inputs["row_info"].fragments))
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = recording
    trainer.train(resume_from_checkpoint=resume)
    if dist.is_initialized():
        assert dist.get_backend() == "gloo"
    result = {
        "world_size": trainer.accelerator.num_processes,
        "wrapped": type(trainer.model_wrapped).__name__,
        "losses": losses(trainer),
        "num_tokens": [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry],
        "seen": seen,
        "eval_loss": trainer.evaluate()["eval_loss"],
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "weights": float(sum(param.double().abs().sum() for param in trainer.model.parameters())),
    }
    Path(out, f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    if trainer.accelerator.process_index == 0:
        torch.save(gradients.steps, Path(out, "gradients.pt"))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Freeing gloo's group at the end of a process can hang, see `trl_packing.recipe.build._settle`.
    os._exit(0)
