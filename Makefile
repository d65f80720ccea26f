# `make demo` and `make test` are the README's two commands; `make test-all` adds the long forms of the tests.
# Each sets up the virtual environment by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A file of tests stays in one of two processes, which wait more than they compute.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
INSTALL := $(BIN)/python install/packages.py
DEMO_OUTPUT ?= demo-output
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all lint types imports clean

demo: $(VENV)/.demo
	$(BIN)/lorabatch demo --output $(DEMO_OUTPUT) --overwrite

test: $(VENV)/.test lint types imports
	$(PYTEST) -m "not long"

test-all: $(VENV)/.test lint types imports
	$(PYTEST) --hypothesis-profile=long

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy -p lorabatch

imports: $(VENV)/.test
	$(BIN)/lint-imports

# torch first: which build of it depends on the machine
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) 'lorabatch[demo]'
	touch $@

# with what the demo needs, so that `make demo` installs nothing afterwards
$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(INSTALL) 'lorabatch[demo,test]'
	touch $(VENV)/.demo $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
