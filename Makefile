# `make run` trains with SWAP end to end; `make test` checks the code. Both make the environment they need.
# `make VENV=<folder> run` uses an environment that exists already.

VENV ?= .venv
PYTHON ?= python3
# Stages are started as `python -m …`, so the environment's Python comes first.
RUN = PATH="$(abspath $(VENV))/bin:$$PATH"
STAMP = $(VENV)/.swap-installed
BENCH_STAMP = $(VENV)/.swap-bench-installed

.PHONY: run analysis test test-long test-slurm chaos bench lint install pictures
.DEFAULT_GOAL := run

run: $(STAMP)
	@$(RUN) swap check
	@$(RUN) dvc repro

# What a finished run looks like from inside: landscapes, directions, choices of workers.
analysis: $(STAMP)
	@$(RUN) dvc --cd analysis repro

test: lint
	@$(RUN) python -m pytest -n 2 --dist worksteal -m "not long"

# What is left out above: whole pipelines, comparisons and analyses under DVC, pages in a browser.
test-long: $(STAMP)
	@$(RUN) python -m pytest -n 2 --dist worksteal -m long

# On a real Slurm, which is started in a temporary folder; Debian's packages are installed first where that is allowed.
test-slurm: $(STAMP)
	@$(RUN) python tests/slurm_cluster.py
	@$(RUN) python -m pytest -rs tests/slurm

# Kills, full disks and damage at random moments, for most of an hour; CHAOS="--seed 7" repeats it with other moments.
chaos: $(STAMP)
	@$(RUN) python tests/chaos.py $(CHAOS)

# How fast it is, against a bare loop and against others; best on a machine that does nothing else.
# BENCH="--only averaging" measures a part. BENCH="--cifar <path>" adds the rows about CIFAR-10's images: a folder with
# train/<class>/*.jpg and test/<class>/*.jpg, or a tar of one (.tar, .tar.gz, .tar.xz), which is unpacked for the time.
bench: $(BENCH_STAMP)
	@$(RUN) python -m benchmarks $(BENCH)

lint: $(STAMP)
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy

install: $(STAMP)

# Those of the README, from what has run here.
pictures:
	@mkdir -p docs/figures
	@cp report/figures/training.png $(addprefix analysis/figures/,landscape_phases.png landscape_workers.png cosine.png workers_accuracy.png) docs/figures/

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
.PHONY: $(BENCH_STAMP)
$(BENCH_STAMP): $(STAMP)
else
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); torch with its CUDA libraries takes a few minutes the first time"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@echo "installing what is compared with: Lightning, timm, mergekit"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]' \
	  || echo "not all of it can be installed here; what is missing is left out of the table"
	@touch $@
endif
