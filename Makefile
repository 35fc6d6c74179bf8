# `make quickstart` and `make test` do everything on a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
CPU := not gpu and not kernels and not network
# Two processes, a whole module in one of them, so that module fixtures are made once.
PARALLEL ?= -n 2 --dist loadscope

.PHONY: help setup quickstart test test-fast test-install test-compat test-kernels test-backends audit lint bench clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

# torch first and alone: the pinned build is small, and whatever asks for torch later is satisfied.
$(BIN)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip<26.2"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

setup: $(BIN)/.ready  ## create .venv and install everything pinned

LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu

quickstart: $(BIN)/.ready  ## fine-tune a real small model on CPU, then two tiny hybrids
	rm -rf runs/quickstart runs/quickstart_qwen3next runs/quickstart_bamba
	$(LAUNCH) recipes/sft.py --config quickstart.yaml
	$(BIN)/python -m trl_packing.quickstart.probe runs/quickstart
	$(LAUNCH) recipes/sft.py --config quickstart_qwen3next.yaml
	$(LAUNCH) recipes/sft.py --config quickstart_bamba.yaml

test: $(BIN)/.ready lint  ## all tests but gpu and kernels
	$(BIN)/python -m pytest $(PARALLEL) -m "$(CPU)"

test-fast: $(BIN)/.ready  ## the fast tier
	$(BIN)/python -m pytest $(PARALLEL) -m "$(CPU) and not slow"

test-install: $(BIN)/.ready  ## fresh environments by pip, by uv and editable; needs a package registry
	$(BIN)/python -m pytest -q -m network tests/test_install.py

# The fast tier at the oldest transformers, and at the newest, for which no usable kernels exists. See _compat.py.
COMPAT := .compat/5.20.2 .compat/5.24.0

.compat/%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -v -e '^transformers==' -e '^kernels==' -e '^huggingface_hub==' -e '^tokenizers==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --upgrade "pip<26.2"
	$(@D)/bin/python -m pip install --quiet -c constraints.txt torch
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt -e '.[quickstart,plots]' pytest pytest-xdist "transformers==$*"
	touch $@

test-compat: $(addsuffix /.ready,$(COMPAT))  ## the fast tier at the other transformers versions
	for folder in $(COMPAT); do \
	  $$folder/bin/python -m pytest -q $(PARALLEL) -m "$(CPU) and not slow" || exit 1; \
	done

# Triton and the kernels stay out of .venv: with them installed, stock hybrids crash on a CPU. mamba-ssm is published as
# source only; its two switches leave its CUDA extension out and look for no prebuilt wheel.
KERNELS := .compat/kernels
$(KERNELS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/python -m pip install --quiet --upgrade "pip<26.2"
	$(KERNELS)/bin/python -m pip install --quiet -c constraints.txt torch
	$(KERNELS)/bin/python -m pip install --quiet -c constraints.txt -e . pytest pytest-xdist triton==3.7.1 einops \
	  setuptools==84.2.1 wheel==0.48.0
	$(KERNELS)/bin/python -m pip install --quiet --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE \
	  $(KERNELS)/bin/python -m pip install --quiet --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
	touch $@

test-kernels: $(KERNELS)/.ready  ## the real Triton kernels in the interpreter, in an environment of their own
	TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest -q $(PARALLEL) -m kernels tests/test_*triton*.py

# DeepSpeed and bitsandbytes change what accelerate and PEFT import and print, so they stay out of .venv too. DeepSpeed builds
# against the torch that is there.
BACKENDS := .compat/backends
$(BACKENDS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BACKENDS)
	$(BACKENDS)/bin/python -m pip install --quiet --upgrade "pip<26.2"
	$(BACKENDS)/bin/python -m pip install --quiet -c constraints.txt torch
	$(BACKENDS)/bin/python -m pip install --quiet -c constraints.txt -e '.[quickstart,quantization]' pytest pytest-xdist setuptools==84.2.1 wheel==0.48.0
	DS_BUILD_OPS=0 $(BACKENDS)/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation deepspeed==0.19.8
	touch $@

test-backends: $(BACKENDS)/.ready  ## ZeRO and QLoRA, in an environment of their own
	$(BACKENDS)/bin/python -m pytest -q $(PARALLEL) -m "$(CPU)" tests/test_backends.py tests/test_qlora.py

audit: $(BIN)/.ready  ## every causal LM architecture of transformers, exact or refused; 20 seeds without a false alarm
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/false_alarms.py

# The limits of fixed and ops are on times, which a busy machine breaks.
bench: $(BIN)/.ready  ## all benchmarks, small
	$(BIN)/python benchmarks/plan.py --samples 100000 --json /dev/null
	$(BIN)/python benchmarks/collators.py --rounds 3
	$(BIN)/python benchmarks/syncs.py
	$(BIN)/python benchmarks/startup.py --samples 10000
	$(BIN)/python benchmarks/throughput.py --rounds 1 --tokens 4096 --rows 1024 4096 \
	  --only "HF flattening" "TRL bfd" "ours, bfd rows" "ours, planned" "ours, fixed"
	$(BIN)/python benchmarks/throughput.py --rounds 1 --tokens 4096 --rows 4096 --model bamba \
	  --only "TRL padded" "ours, planned" "ours, fixed"
	-$(BIN)/python benchmarks/fixed.py --models bamba --rounds 2 --tokens 16384
	$(BIN)/python benchmarks/expect.py --rounds 1 --tokens 20000 --only narrow lognormal
	$(BIN)/python benchmarks/compile.py --rows 4
	$(BIN)/python benchmarks/gpu.py --device cpu --size tiny
	$(BIN)/python benchmarks/isolation.py --rounds 1 --models llama bamba
	-$(BIN)/python benchmarks/ops.py --rounds 2
	$(BIN)/python benchmarks/memory.py

lint: $(BIN)/.ready  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove what the targets made
	rm -rf $(VENV) .compat runs dist build
