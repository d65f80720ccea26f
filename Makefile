# The README's two commands: `make demo` and `make test`. Both set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
DEMO_OUTPUT ?= demo-output

.PHONY: demo test lint types imports clean

demo: $(VENV)/.demo
	$(BIN)/lorabatch demo --output $(DEMO_OUTPUT) --overwrite

test: $(VENV)/.test lint types imports
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy -p lorabatch

imports: $(VENV)/.test
	$(BIN)/lint-imports

# torch first and pinned: anything else would choose a build of several gigabytes
$(VENV)/.base: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) -e '.[demo,test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
