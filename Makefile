.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "LoopScope needs Python 3.11 or newer; run: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[report,dev]'
	@touch $(STAMP)

install: $(STAMP)  ## create .venv and install everything into it

demo: $(STAMP)  ## train, record, diagnose and report four small looped Transformers
	$(BIN)/loopscope demo --out runs/demo

test: $(STAMP)  ## the quick tests
	@scripts/browser
	$(BIN)/python -m pytest

test-all: $(STAMP)  ## the quick tests and the long ones, with Ray
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[report,dev,ray]'
	@scripts/browser
	$(BIN)/python -m pytest -m ''

check: $(STAMP)  ## linter, formatter, type checker, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: help install demo test test-all check
