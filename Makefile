# HN-CLIP. `make help` lists the targets.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
DATASET ?=
SOURCE  ?=
IMAGES  ?=
OUT     ?=
OPTIONS ?=
ALLOW_MISSING ?=
WORKERS ?=
PART    ?=

.DEFAULT_GOAL := help
# `shards` is a folder as well: without .PHONY make would call it up to date.
.PHONY: help setup demo shards test test-long test-gpu lint format wheel clean bench

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv with everything that the demo and the tests need; nothing to do when nothing changed

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"error: Python 3.11 to 3.13 is needed, {sys.executable} is {v[0]}.{v[1]}; say which: make setup PYTHON=python3.12")'
	@command -v c++ >/dev/null || { echo "error: DeepSpeed compiles its CPU collectives when a run starts: install a C++ compiler (c++)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[demo,dev]'
	@touch $@

demo: setup  ## The main job end to end: shards, three trainings, evaluation, ONNX, a query (20 minutes at most)
	$(BIN)/python -m pipeline.demo

shards: setup  ## Shards of a data set: make shards DATASET=dci [SOURCE=...] [IMAGES=...] [OUT=...] [WORKERS=n] [PART=i/n] [OPTIONS='key=value ...']
	@test -n '$(DATASET)' || { echo "error: which data set? make shards DATASET=name, one of:"; $(BIN)/pipeline shards list; exit 2; }
	$(BIN)/pipeline shards write '$(DATASET)' $(if $(SOURCE),--source '$(SOURCE)') $(if $(IMAGES),--images '$(IMAGES)') $(if $(OUT),--out '$(OUT)') $(if $(ALLOW_MISSING),--allow-missing '$(ALLOW_MISSING)') $(if $(WORKERS),--workers '$(WORKERS)') $(if $(PART),--part '$(PART)') $(foreach o,$(OPTIONS),--option '$(o)')

test: setup  ## The tests
	$(BIN)/python -m pytest -m 'not gpu and not long' --durations=15

test-long: setup  ## Soak tests and kill sweeps
	$(BIN)/python -m pytest -m long

test-gpu: setup  ## What only a GPU can show (8 minutes at most; skipped without one)
	$(BIN)/python -m pytest -m gpu

bench: setup  ## Speed and memory side by side with the peer, as ratios (minutes; quiet machine)
	$(BIN)/python -m tests.bench.objective
	$(BIN)/python -m tests.bench.token
	$(BIN)/python -m tests.bench.shards
	$(BIN)/python -m tests.bench.loader
	$(BIN)/python -m tests.bench.frameworks
	$(BIN)/python -m tests.bench.train_step
	$(BIN)/python -m tests.bench.startup

lint: setup  ## Ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## Let ruff format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup  ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## Remove .venv and what tools left; data/ and runs/ stay
	rm -rf $(VENV) dist build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
