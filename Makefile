# make quickstart   install, then see a language model learn by reinforcement learning (CPU, minutes)
# make test         install, then the tests on tiny models with the real engine and trainer (no GPU)
.DEFAULT_GOAL := help
VENV ?= .venv
KIND ?= cpu
LANES ?= 2
PY := $(VENV)/bin/python
STAMP := $(VENV)/.vime-installed
export PATH := $(abspath $(VENV))/bin:$(PATH)

.PHONY: help setup quickstart test test-fast test-slow test-parallel test-gpu chaos lint format type imports docs check clean

help:  ## show these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints-cpu.txt scripts/install.sh
	@scripts/install.sh $(VENV) $(KIND)
	@touch $@

setup: $(STAMP)  ## only install (KIND=cuda for NVIDIA GPUs)

quickstart: $(STAMP)  ## GRPO end to end on this machine's CPU
	@$(PY) examples/quickstart/run.py $(ARGS)

test: $(STAMP)  ## everything but slow and gpu; in two lanes, or LANES=n
	@$(PY) -m pytest -n $(LANES) -m "not slow and not gpu" $(ARGS)

test-fast: $(STAMP)  ## what needs no engine and no ranks, about two minutes
	@$(PY) -m pytest -n $(LANES) -m "not slow and not gpu and not engine and not ranks" $(ARGS)

test-slow: $(STAMP)  ## minutes each: learning, control runs, examples
	@$(PY) -m pytest -m "slow and not gpu" $(ARGS)

test-parallel: $(STAMP)  ## every parallel layout against one process, as a table, about five minutes
	@$(PY) -m tests.trainer.megatron.run_matrix $(ARGS)

test-gpu: $(STAMP)  ## needs a CUDA device
	@$(PY) -m pytest -m gpu $(ARGS)

chaos: $(STAMP)  ## kill the processes of small runs at random moments, resume, check (ROUNDS=n)
	@$(PY) -m tests.chaos --rounds $(or $(ROUNDS),10) $(ARGS)

lint: $(STAMP)  ## ruff, spelling
	@ruff check . && ruff format --check . && codespell

format: $(STAMP)  ## let ruff fix and format
	@ruff check --fix . && ruff format .

type: $(STAMP)  ## mypy
	@mypy

imports: $(STAMP)  ## the arrows between packages
	@lint-imports

docs: $(STAMP)  ## regenerate configuration.md, metrics.md and the tables of other pages in docs/
	@$(PY) -m vime.cli.docs docs

check: lint type imports  ## all static checks

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
