# Every target does its own set-up: it needs Python 3.11 or newer, pip and make, nothing else.
#   make demo    train, kill, resume, compare every bit         make test   the test suite
#   make check   format, lint, types                            make docs   the site, warnings are errors
#   make soak    kills at 40 moments, and at every operation    make clean  remove what the others made
#   make servers installs S3, HDFS and Chromium, for the tests that need them and are skipped without
#   make stores  the tests on SFTP, GCS and Ceph, which it installs
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STORES ?= sftp gcs ceph
space := $() $()
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# Most tests wait for processes of their own, so there is one worker more than there are cores, four at most; a file's
# tests share servers, so they stay together. In the order of their names the files that take longest come first; by
# the number of their tests, as xdist has it otherwise, they would come last, one after the other.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test check format docs conformance soak servers stores clean whole-package

help:
	@sed -n '2,7s/^# *//p' Makefile

demo: $(VENV)/.examples
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev
	$(PYTEST) -m "not stores"

servers: $(VENV)/.dev
	@scripts/servers.sh $(BIN)/python s3 hdfs browser

stores: $(VENV)/.dev
	@scripts/servers.sh $(BIN)/python $(STORES)
	$(BIN)/python -m pytest -m stores -k "$(subst $(space), or ,$(strip $(STORES)))"

soak: $(VENV)/.dev
	MONSESS_RANDOM_KILLS=40 $(PYTEST) -m soak

check: $(VENV)/.dev whole-package
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.dev whole-package
	$(BIN)/python scripts/conformance.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in site/: open site/index.html"

conformance: $(VENV)/.dev
	$(BIN)/python scripts/conformance.py

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "monsess needs Python 3.11 or newer; $(PYTHON) is older or missing. Try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)

# The stamps hold the set-up back until pyproject.toml changes; a failed install leaves none.
$(VENV)/.examples: pyproject.toml | $(BIN)/python
	@echo "Installing monsess and what the examples need (JAX, Orbax, scikit-learn): about a minute ..."
	@$(PIP) install -e '.[examples]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "Installing monsess and the tools for its development: a minute or two ..."
	@$(PIP) install -e '.[dev]'
	@touch $@ $(VENV)/.examples

# What reads the sources without importing them knows nothing of setuptools' package-dir: links show it hooks/ as
# monsess.hooks.
whole-package:
	@rm -rf build/sources && mkdir -p build/sources/monsess
	@ln -s $(CURDIR)/monsess/* $(CURDIR)/hooks build/sources/monsess/
