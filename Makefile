# `make quickstart` and `make test` do everything on a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup quickstart test test-fast test-compat test-kernels audit lint bench clean

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

quickstart: $(BIN)/.ready  ## fine-tune a real small model on CPU, offline after installation
	$(BIN)/accelerate launch --num_processes 1 --cpu recipes/sft.py --config quickstart.yaml

test: $(BIN)/.ready lint  ## all tests but gpu, audit and kernels
	$(BIN)/python -m pytest -m "not gpu and not audit and not kernels and not network"

test-fast: $(BIN)/.ready  ## the fast tier
	$(BIN)/python -m pytest -m "not gpu and not audit and not kernels and not network and not slow"

lint: $(BIN)/.ready  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove what the targets made
	rm -rf $(VENV) .compat runs dist build
