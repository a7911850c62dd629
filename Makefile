# `make demo` shows the thing working (DEMO=terminal: without a page), `make test` checks all of it, `make quick` what takes under a minute.
# Each sets up .venv by itself. `make simuleval` adds SimulEval, in an environment of its own, for the tests that compare with it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SIMULEVAL := .venv-simuleval

.PHONY: demo test quick lint simuleval clean

demo: $(VENV)/.installed-demo
	$(BIN)/zendaya demo $(if $(filter terminal,$(DEMO)),,--page)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest --numprocesses auto $(ARGS)

quick: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest --numprocesses auto -m "not slow and not integration and not browser" $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One environment for both; a set of extras is installed again only when what it is made from changes, the native engine's C with it.
$(VENV)/.installed-%: pyproject.toml constraints.txt setup.py $(wildcard src/zendaya/runtime/engine/native/*)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, got " + sys.version.split()[0] + ": make PYTHON=python3.11 …" if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@

# SimulEval pins old versions and registers a pytest plugin that breaks newer pytests: it shares our packages, but not our environment.
simuleval: $(SIMULEVAL)/.installed

$(SIMULEVAL)/.installed: $(VENV)/.installed-dev
	@test -x $(SIMULEVAL)/bin/python || $(BIN)/python -m venv $(SIMULEVAL)
	$(SIMULEVAL)/bin/python -m pip install --quiet --disable-pip-version-check simuleval==1.1.4
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > $(SIMULEVAL)/shared.pth
	@mv $(SIMULEVAL)/shared.pth $(SIMULEVAL)/lib/python*/site-packages/
	@touch $@

clean:
	rm -rf $(VENV) $(SIMULEVAL) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
