"""
Packed LoRA fine-tuning from one YAML.

```bash
accelerate launch recipes/sft.py --config quickstart.yaml
accelerate launch --num_processes 8 recipes/sft.py --config llama.yaml --learning_rate 1e-4
```

`--config` takes a path or the name of a file in `configs/`; the command line overrides the YAML; every option of `trl
sft` works. This file is meant to be copied and changed.
"""

from trl_packing.recipe import build_sft, finish_sft, parse_sft, usage_errors


def main(argv: list[str] | None = None) -> None:
    # A user's mistake ends in one sentence and exit code 2, before training.
    with usage_errors():
        script_args, training_args, model_args, dataset_args, _ = parse_sft(argv, recipe_file=__file__)
        trainer = build_sft(script_args, training_args, model_args, dataset_args)
        # Proves that samples stay apart before the first step, and stops otherwise.
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    finish_sft(trainer, script_args.dataset_name)


if __name__ == "__main__":
    main()
