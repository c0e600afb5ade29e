# make demo    train, kill a rank, recover, report: on this machine, no GPU and no root needed
# make test    everything CI runs: set-up, lint, types, layers, all tests
# make quick   lint and the unit and contract tests
# make bench   the numbers of the README, measured side by side; results in tests/benchmarks/results
# make mutation  change the code in small ways: a test must fail each time
# make interface  write down what users rely on, where it may change: flags, JSON keys, formats
# make soak    many kills, storms, fuzzing, further variants of whole jobs, many random examples

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Most tests wait for processes and time limits more than they compute.
WORKERS ?= $(shell echo $$(( $$(nproc) * 3 )))
# PYTEST_ARGS may name tests of one of two groups only: pytest's code 5 is no failure then.
NONE_IS_FINE = $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])
# Hundreds of processes would compile all of gpuops anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test quick lint pytest services bench mutation interface soak clean

help:
	@sed -n 's/^# //p' Makefile

# `python3 -m venv` needs a Debian package that a bare system lacks; only root can bring it.
$(BIN)/python:
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || tests/services.sh venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than Python 3.11; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: cannot create a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[torch]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[torch,postgres,report,dev]' hatchling
	@touch $@

$(VENV)/.installed-soak: $(VENV)/.installed-test
	$(PIP) install --quiet --constraint constraints.txt --editable '.[torch,frameworks]'
	@touch $@

demo: $(VENV)/.installed-demo
	@$(BIN)/gpuops demo --dir .demo

services:
	@tests/services.sh

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Each process of pytest would rewrite the asserts of all tests: two do so before, and leave files.
OTHER_TESTS := tests/contract tests/faults tests/integration tests/packaging
REWRITE = printf '%s\n' tests/unit '$(OTHER_TESTS)' | xargs -L 1 -P 2 $(BIN)/python -m pytest --collect-only --quiet

pytest: $(VENV)/.installed-test
	@$(if $(PYTEST_ARGS),,$(REWRITE) >/dev/null || true)  # what cannot be imported, pytest says
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'not soak' $(PYTEST_ARGS)

test: services lint pytest

quick: services lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'not soak' tests/unit tests/contract $(PYTEST_ARGS)

bench: services $(VENV)/.installed-test
	$(BIN)/python tests/benchmarks/run_all.py

mutation: $(VENV)/.installed-test
	$(BIN)/python tests/mutation/check.py

interface: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m support.public_interface tests/fixtures/public_interface.json

soak: services $(VENV)/.installed-soak
	$(BIN)/python -m pytest -m soak --timeout 3600 $(PYTEST_ARGS) $(NONE_IS_FINE)
	GPUOPS_TEST_DRAWS=many $(BIN)/python -m pytest --numprocesses $(WORKERS) -m 'hypothesis and not soak' --timeout 3600 $(PYTEST_ARGS) $(NONE_IS_FINE)

clean:
	rm -rf $(VENV) .demo dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
