# Two commands: `make demo` shows the thing working (DEMO=terminal: without a page), `make test` checks it. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.installed-demo
	$(BIN)/zendaya demo $(if $(filter terminal,$(DEMO)),,--page)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest --numprocesses auto $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One environment for both; a set of extras is installed again only when what it is made from changes, the native engine's C with it.
$(VENV)/.installed-%: pyproject.toml constraints.txt setup.py $(wildcard src/zendaya/engine/native/*)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, got " + sys.version.split()[0] + ": make PYTHON=python3.11 …" if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
