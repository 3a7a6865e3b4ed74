# make train, make test: all that a fresh machine needs is Python (3.11 or newer) and make.
#   make train ARGS="--stage 1 --optimizer muon"
#   make quick                     # a minute or two: what compiles little, and a smoke test
#   make test ARGS="-k layout"
#   make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
# A folder that keeps what was compiled: the next run compiles only programs that have changed. make test CACHE=.venv/jax
ifdef CACHE
export JAX_COMPILATION_CACHE_DIR := $(abspath $(CACHE))
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1
endif
ARGS ?=
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q --durations 15
# Unit tests that compile little, then a smoke test of every stage, view and family of rules.
QUICK := $(addprefix tests/,sharding jaxpr checkpoint/test_chunks.py fsdp/test_gathers.py fsdp/test_reorder.py \
  gradients/test_batch.py comm/test_collectives.py analysis/test_table.py analysis/test_hlo.py analysis/test_plan.py \
  whole/test_messages.py whole/test_helpers.py whole/test_project.py whole/test_smoke.py)

.PHONY: train bench quick test test-all grid lint docs notebooks lab package clean

train: $(VENV)/.examples
	$(BIN)/python examples/train_gpt.py $(ARGS)

bench: $(VENV)/.examples
	$(BIN)/python benchmarks/run.py

quick: $(VENV)/.test
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .
	$(PYTEST) $(QUICK) $(ARGS)

test: $(VENV)/.test
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.test
	$(PYTEST) -m "slow or not slow" $(ARGS)
	$(MAKE) grid ARGS=

# Every optimizer on every mesh, at every stage, in every way. Resumes: make grid ARGS="--minutes 60"
grid: $(VENV)/.test
	nice -n 10 $(BIN)/python benchmarks/grid.py --workers $(WORKERS) $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -q -c docs . build/docs
	@echo "The documentation is in build/docs: open build/docs/docs/index.html"

# Executes the notebooks and keeps their outputs.
notebooks: $(VENV)/.test
	$(BIN)/python notebooks/execute.py $(ARGS)

# Opens the notebooks in a browser.
lab: $(VENV)/.lab
	$(BIN)/jupyter lab --notebook-dir .

# Builds the wheel and the source distribution, installs each in an environment of its own and trains a step there.
package: $(VENV)/.test
	$(BIN)/python -m pytest -q -m slow tests/whole/test_package.py $(ARGS)

clean:
	rm -rf .venv .venv312 runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per extra; a change of pyproject.toml installs again.
$(VENV)/.%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable ".[$*]"
	touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxzero needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
