# Everything runs in .venv, made at the first use: a fresh machine needs only make and Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-long lint clean

demo: $(VENV)/.installed
	$(BIN)/python -m xgpt.app.demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not long"

test-long: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m long

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist

# torch first and by its full version: a machine that keeps its own build of it is then sure to use that one.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(shell grep '^torch==' constraints.txt)
	$(PIP) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[test]'
	touch $@
