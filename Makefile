.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
# Bytecode is compiled where it is needed: of all that is installed, that takes a fifth of the time.
PIP := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt

# What .venv has; each one builds on the one before.
DEMO := .venv/.demo
DEV := .venv/.dev
RAY := .venv/.ray
DOCS := .venv/.docs
VLLM ?= .venv-vllm

# `make test` has one worker a core, or as many as asked for (0: one test after the other). The tests of a file stay together and share its fixtures.
PYTEST_WORKERS ?= auto
PYTEST_DIST ?= loadfile

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

$(DEMO): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "LoopScope needs Python 3.11 or newer; run: make PYTHON=python3.12 ..."; exit 2; }
	"$(PYTHON)" -m venv .venv
	$(PIP) -e '.[report,torch]'
	@touch $@

$(DEV): $(DEMO)
	$(PIP) -e '.[dev]'
	@touch $@

$(RAY): $(DEV)
	$(PIP) -e '.[dev,ray]'
	@touch $@

$(DOCS): $(DEMO)
	$(PIP) -e '.[report,torch,docs]'
	@touch $@

install: $(DEV)  ## create .venv and install everything for development into it

demo: $(DEMO)  ## train, record, diagnose and report five small looped Transformers
	$(BIN)/loopscope demo --out runs/demo

test: $(DEV)  ## the quick tests
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist $(PYTEST_DIST)

test-all: $(RAY)  ## the quick tests and the long ones, with Ray
	$(BIN)/python -m pytest -m ''

kills: $(DEV)  ## kill all that writes 400 times, let two write at once, fill the disk
	$(BIN)/python -m tests.kills

test-page: $(DEV)  ## the page of a report in a browser; `make browser` installs one
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m '' tests/report/test_page.py

test-transformers: $(DEV)  ## looped models in transformers, PEFT and lm_eval's own model, the long tests too
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist $(PYTEST_DIST) -m '' tests/integrations/transformers

$(VLLM)/.ready: pyproject.toml scripts/vllm-env
	scripts/vllm-env $(VLLM)
	@touch $@

test-vllm: $(VLLM)/.ready  ## the tests of the vLLM plugin, in an environment of its own (3.5 GB, installed once)
	$(VLLM)/bin/python -m pytest -p no:cacheprovider -m '' -W default -s tests/integrations/vllm

fuzz: $(DEV)  ## 20,000 mutated inputs of every kind of file and argument; FUZZ="--seed 1" for others
	$(BIN)/python -m tests.fuzz --inputs 20000 --seed 0 $(FUZZ)

browser: $(DEV)  ## install a Chromium for the tests of the page; asks the system's package manager, with sudo if need be
	@scripts/browser

docs: $(DOCS)  ## the site of these docs, into site/: strict, searchable, readable without a server
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/site.py

results: $(DEMO)  ## the results of the paper's study at demo scale, into docs/evidence; hours, or what is finished
	@scripts/results

check: $(DEV)  ## linter, formatter, type checker, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: help docs results install demo test test-all test-transformers test-vllm fuzz kills test-page browser check
