# `make bundle` builds the example bundle, `make test` runs all that CI runs. Both set up .venv by themselves.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
# Always with the constraints: an unpinned torch pulls gigabytes of CUDA packages.
INSTALL := $(PIP) install -c constraints.txt -e
REQUIREMENTS := pyproject.toml constraints.txt

MODEL ?= artifacts/models/llama-3.1-8b
TARGET ?= h200
OUT ?= bundles/$(notdir $(MODEL))-$(TARGET)
BUILD_ARGS ?= --fuse
PYTEST_ARGS ?=
PEERS_ARGS ?=
SOURCES := gemmcache tests tools

export HF_HUB_OFFLINE := 1

.PHONY: help bundle test lint format typecheck peers clean distclean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | expand -t 12

bundle: $(VENV)/.build  ## compile the example bundle (Llama-3.1-8B, H200); needs no GPU
	@$(BIN)/gemmcache build $(MODEL) $(BUILD_ARGS) --target $(TARGET) --out $(OUT)

test: $(VENV)/.dev  ## lint, format, types and the tests that need no GPU
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

peers:  ## time the example bundle beside other libraries; needs a GPU, and torch for it in $(PYTHON)
	@$(PYTHON) -m tools.peer_benchmark $(OUT) $(PEERS_ARGS)

lint: $(VENV)/.dev  ## lint and check the format
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)

typecheck: $(VENV)/.dev  ## check the types
	@$(BIN)/mypy

format: $(VENV)/.dev  ## format, and fix what lint can fix
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

clean:  ## remove caches and build folders
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## remove .venv and bundles too
	rm -rf $(VENV) bundles

# The stamps are written last: an interrupted installation is done again.
$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.build: $(REQUIREMENTS) | $(BIN)/python
	@echo "installing what a build needs into $(VENV)"
	@$(INSTALL) '.[build,quack,hf]'
	@touch $@

$(VENV)/.dev: $(REQUIREMENTS) | $(BIN)/python
	@echo "installing what the tests need into $(VENV)"
	@$(INSTALL) '.[dev]'
	@touch $(VENV)/.build $@
