# make demo   set up, then compare disaggregated with colocated serving on this machine   (result in out/demo)
# make test   set up, then lint, type-check and run every test
# make bench  set up, then three workloads at five rates, sized to this machine, within 45 minutes       (report in out/bench)
# make proto  generate disagg/pb from proto/ again
# make setup  only the set-up: a virtual environment in .venv, disagg in it, and a small model in the user's cache
#
# Variables: PYTHON=python3.12      the interpreter (3.11 or newer)
#            EXTRA=cpu|gpu          which vLLM; without it: gpu where nvidia-smi works, else cpu
#            TORCH_INDEX=URL        a further package index, where pip's own has no CPU build of PyTorch
#            PIP_ARGS="..."         anything else for pip
#            JOBS=2                 how many test files run at a time
#            TOPOLOGY, WORKLOAD, OUT    what `make demo` compares, and where it writes
#            ARGS="..."             further options of its `disagg ab`; by default the workload is sized to this machine

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help demo bench test lint types unit setup proto clean

VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
MODEL := smollm2-135m
TOPOLOGY ?= cluster/topologies/cpu-1p1d.yaml
WORKLOAD ?= demo
OUT ?= out/demo
ARGS ?= --fit-machine tokens --rounds 2 --chunk topology
STAMP := $(VENV)/.complete-$(EXTRA)
export EXTRA TORCH_INDEX PIP_ARGS

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -13

# The stamp is the last thing that set-up writes; a virtual environment without it is made anew.
$(STAMP): pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" scripts/setup.sh $(VENV) $(STAMP)

setup: $(STAMP)
	@echo "==> [4/4] model $(MODEL)"
	$(BIN)/disagg model get $(MODEL)

demo: setup
	@echo "==> comparing disaggregated with colocated serving on this machine ($(TOPOLOGY), workload $(WORKLOAD))"
	$(BIN)/disagg ab $(TOPOLOGY) --workload $(WORKLOAD) $(ARGS) --out $(OUT)

bench: setup
	@$(BIN)/pip install -q $(PIP_ARGS) -e ".[bench]"
	$(BIN)/python -m bench.ab --topology $(TOPOLOGY) --out out/bench $(BENCH_ARGS)

lint: $(STAMP)
	@echo "==> ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	echo "==> mypy"
	$(BIN)/mypy

# Quick and pure first, real engines last; the first failure ends it. What runs in processes or against a clock gets a second try, because
# machines are shared: a fault fails twice. The pure tests get none. $(JOBS) files run at a time, one more where tests wait for processes half
# of their time, but not what compares a clock's readings (`timed`) or wants all cores for itself. The byte code is compiled once, for the
# hundreds of processes that tests start, where PYTHONDONTWRITEBYTECODE keeps them from it.
JOBS ?= 2
WAITING_JOBS ?= $(shell echo $$(($(JOBS) + 1)))
ALONE ?= timed
PYTEST := $(BIN)/python -m pytest -x --durations 10
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder
test: setup
	@$(BIN)/python -m compileall -q disagg bench tests
	$(MAKE) --no-print-directory -j 2 lint unit
	echo "==> pytest: contracts, and the whole with simulated engines, over Ray too"
	$(PYTEST) --reruns 1 -n $(WAITING_JOBS) $(SIDE_BY_SIDE) -m "not ($(ALONE))" $(PYTEST_ARGS) tests/contracts tests/flow
	echo "==> pytest: against a clock, or with all cores"
	$(PYTEST) --reruns 1 -m "$(ALONE)" $(PYTEST_ARGS) tests/contracts tests/flow
	echo "==> pytest: real engines"
	$(PYTEST) --reruns 1 -n $(WAITING_JOBS) $(SIDE_BY_SIDE) $(PYTEST_ARGS) tests/e2e

unit: $(STAMP)
	@echo "==> pytest: the pure parts"
	$(PYTEST) -n $(JOBS) $(SIDE_BY_SIDE) $(PYTEST_ARGS) tests/unit

proto: $(STAMP)
	@echo "==> generating disagg/pb"
	$(BIN)/python scripts/gen_proto.py

clean:
	@echo "==> removing $(VENV), out and caches here (the model stays in the user's cache)"
	rm -rf $(VENV) out build .mypy_cache .ruff_cache .pytest_cache *.egg-info
