# Needs python3 (3.11 or newer) and make; every target sets up .venv by itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo reproduce test portable slow package lint bench docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train networks on digits and measure how flat their minima are
	@$(BIN)/python -m saltflat.demo

# What was begun is gone on with. (Others: make reproduce EXPERIMENT=… SIZE=full REPRODUCE="--device cuda".)
EXPERIMENT ?= all
SIZE ?= small

reproduce: $(STAMP) ## run the papers' experiments, on two cores (EXPERIMENT=…, SIZE=full)
	$(BIN)/saltflat reproduce $(EXPERIMENT) --size $(SIZE) --workers 2 $(REPRODUCE)

# Two workers of one thread each are faster than one worker of two threads.
test: $(STAMP) ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# The numbers must not depend on the CPU: the numeric tests once more with the least instructions
# that torch, oneDNN and MKL know. (For another set: make portable CPU="ATEN_CPU_CAPABILITY=avx2".)
CPU ?= ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
NUMERIC := $(addprefix tests/test_,balance.py cancellation.py geometric.py least_trace.py \
	measures.py minimum_sharpness.py noise_floor.py normalized_features.py normalized_recipe.py peers.py)

portable: $(STAMP) ## run the numeric tests as on the oldest CPU
	OMP_NUM_THREADS=1 $(CPU) $(BIN)/python -m pytest -n 2 $(NUMERIC)

slow: $(STAMP) ## run the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

package: $(STAMP) ## build the wheel and the source archive; run the wheel in an empty environment
	.ci/package

lint: $(STAMP) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## compare speed, error and memory with the alternatives (BENCH="--quick")
	$(BIN)/python -m bench.curvature $(BENCH)

# The other benchmarks: python -m bench.measures | bench.training | bench.fam | bench.convex |
# bench.profile | bench.versions | bench.h200; bench/README.md lists what they found.

# The examples of the gallery are run, and what they print and draw is shown; a warning is an error.
docs: $(DOCS_STAMP) ## build the documentation, docs/_build/html/index.html
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist docs/_build docs/examples docs/reproduced .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench -name __pycache__ -type d -exec rm -rf {} +

# torch goes first, on its own, so that everything after it builds on the pinned one. The two peers
# of the tests and benchmarks go last and without dependencies: BackPACK asks for torchvision, which
# it only needs for an example, and curvlinops asks for BackPACK. What they import is in [dev].
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("saltflat needs Python 3.11 or newer")'
	@echo "Setting up $(VENV); the first time takes a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch hatchling
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@$(PIP) --no-deps backpack-for-pytorch curvlinops-for-pytorch
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@
