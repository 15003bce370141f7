# Needs Python >= 3.11 with pip; everything else goes into the virtual environment $(VENV).

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
MANIFEST := pyproject.toml setup.py constraints.txt

.PHONY: help install test lint format gates bench docs demo clean

help:
	@echo "make install set up $(VENV) with everything the tests need; $(BIN)/epicute is the command"
	@echo "make test    CPU tests, kernel compilation included; no GPU needed"
	@echo "make lint    ruff, mypy and the import rules"
	@echo "make gates   compile every kernel variant and check spills, hazards, shared memory"
	@echo "make bench   measure on a GPU; writes benchmarks/results"
	@echo "make docs    build the documentation into site/"
	@echo "make demo    compose, compile and check real projections of a small model, run them where there is a GPU; then it writes"
	@echo "make format  apply ruff's fixes and format"
	@echo "make clean   remove what was built and the tools' caches; not $(VENV)"

install: $(VENV)/.installed-test

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not gates"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Objects of unchanged keys come from the cache of the last run.
gates: export EPICUTE_TEST_CACHE ?= $(CURDIR)/.cache/gates
gates: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gates --allow-dirty --out .cache/gates.json -n $(JOBS) --dist worksteal

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks

docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict

demo: $(VENV)/.installed-demo
	$(BIN)/python -m epicute.cli demo

clean:
	rm -rf build dist site *.egg-info .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "epicute needs Python >= 3.11; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(MANIFEST) | $(BIN)/python
	$(PIP) -e .
	@touch $@

# One stamp per extra: .installed-test, .installed-bench, .installed-docs, .installed-demo.
$(VENV)/.installed-%: $(MANIFEST) | $(BIN)/python
	$(PIP) -e '.[$*]'
	@touch $@ $(VENV)/.installed
