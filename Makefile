# `make run` trains with SWAP end to end; `make test` checks the code; `make help` lists the rest. Each creates the
# environment it needs. `make VENV=<folder> run` uses an existing environment. `make TORCH=2.10.0 run` creates one with
# another torch, for GPUs or drivers that the tested one does not support (docs/gpus.md).

VENV ?= .venv$(addprefix -torch-,$(TORCH))
PYTHON ?= python3
# Stages are started as `python -m …`, so the environment's Python comes first.
RUN = PATH="$(abspath $(VENV))/bin:$$PATH"
STAMP = $(VENV)/.swap-installed
BENCH_STAMP = $(VENV)/.swap-bench-installed
DOCS_STAMP = $(VENV)/.swap-docs-installed

OLDEST_TORCH = 2.8.0

.PHONY: run analysis test test-long test-gpu test-oldest test-slurm chaos bench docs lint install pictures help
.DEFAULT_GOAL := run

run: $(STAMP) ## train end to end; the default
	@$(RUN) swap check
	@$(RUN) dvc repro

analysis: $(STAMP) ## analyse a finished run: landscapes, gradient directions, subsets of workers
	@$(RUN) dvc --cd analysis repro

test: lint ## linters, types and the quick tests
	@$(RUN) python -m pytest -n 2 --dist worksteal -m "not long"

test-long: $(STAMP) ## whole pipelines, comparisons and analyses under DVC, pages in a browser
	@$(RUN) python -m pytest -n 2 --dist worksteal -m long

test-gpu: $(STAMP) ## tests that need GPUs; lists those it skips
	@$(RUN) python -m pytest -rs -m gpu tests/gpu

test-oldest: ## training, averaging and resuming with the oldest supported torch, in its own environment (6 GB)
	@$(MAKE) TORCH=$(OLDEST_TORCH) test-torch

.PHONY: test-torch
test-torch: $(STAMP)
	@$(RUN) python -m pytest -n 2 --dist worksteal -m "not long" $(patsubst %,tests/test_%.py, \
	  training shards batchnorm averaging checkpoint resume precision moving_mean memory gpus data loader models)

# Starts Slurm in a temporary folder, and installs its Debian packages first if it may.
test-slurm: $(STAMP) ## the tests on a real Slurm with two emulated nodes
	@$(RUN) python tests/slurm_cluster.py
	@$(RUN) python -m pytest -rs tests/slurm

# CHAOS="--seed 7" picks other moments.
chaos: $(STAMP) ## kills, full disks and damage at random moments; most of an hour
	@$(RUN) python tests/chaos.py $(CHAOS)

# BENCH="--only averaging" runs only a part. BENCH="--cifar <path>" adds rows for CIFAR-10's images: a folder with
# train/<class>/*.jpg and test/<class>/*.jpg, or a tar of one (.tar, .tar.gz, .tar.xz), which is unpacked temporarily.
# BENCH="--photos <path>" takes photographs, laid out alike, for the rows about images of 500 × 375 pixels.
bench: $(BENCH_STAMP) ## speed against a bare loop and other libraries; needs an idle machine
	@$(RUN) python -m benchmarks $(BENCH)

docs: $(DOCS_STAMP) ## build the documentation into site/
	@$(RUN) python docs/generate.py
	@$(RUN) NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	@echo "documentation: site/index.html"

lint: $(STAMP) ## ruff and mypy
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy

install: $(STAMP) ## only create the environment

pictures: ## copy this checkout's figures into docs/figures
	@mkdir -p docs/figures
	@cp report/figures/training.png $(addprefix analysis/figures/,landscape_phases.png landscape_workers.png cosine.png workers_accuracy.png) docs/figures/

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

ifeq ($(origin VENV),command line)
# Somebody's own environment: looked at, never changed.
.PHONY: $(STAMP)
$(STAMP):
	@test -x $(VENV)/bin/python || { echo "error: there is no Python environment in $(VENV)"; exit 1; }
	@$(VENV)/bin/python -c 'import importlib.util, sys; \
	  needed = "click dvc hypothesis jinja2 matplotlib mypy numpy PIL psutil pytest rich ruamel ruff safetensors torch torchvision xdist xxhash"; \
	  lacking = [name for name in needed.split() if not importlib.util.find_spec(name)]; \
	  sys.exit(lacking and f"error: $(VENV) lacks {lacking}: $(VENV)/bin/pip install -c constraints.txt -e .[dev]" or 0)'
# What it lacks of the peers is left out of the table.
.PHONY: $(BENCH_STAMP) $(DOCS_STAMP)
$(BENCH_STAMP): $(STAMP)
$(DOCS_STAMP): $(STAMP)
	@test -x $(VENV)/bin/mkdocs || { echo "error: $(VENV) lacks mkdocs: $(VENV)/bin/pip install -c constraints.txt -e .[docs]"; exit 1; }
else
# Another torch brings its own CUDA libraries, torchvision, triton and sympy.
CONSTRAINTS = $(if $(TORCH),{ grep -vE '^(torch|torchvision|triton|sympy|nvidia-|cuda-)' constraints.txt; echo torch==$(TORCH); },cat constraints.txt)
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); torch with its CUDA libraries takes a few minutes the first time"
	@$(CONSTRAINTS) > $(VENV)/constraints.txt
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@echo "installing libraries to compare with: Lightning, timm, mergekit"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev,bench]' \
	  || echo "some cannot be installed here and will be left out of the table"
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@echo "installing mkdocs-material"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev,docs]'
	@touch $@
endif
