# The doors: demo, test, lint, bench, asan. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := setup.cfg setup.py pyproject.toml $(wildcard tarshards/*/*.[ch])

demo: $(VENV)/.demo
	$(BIN)/python notebooks/digits.py

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto $(PYTEST)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All of them, or one: make bench ONLY=smoke; a task or program by its name; the suite with some peers: PEERS=a,b
bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py $(ONLY) $(PEERS:%=--peers=%)

asan: $(VENV)/.test
	PYTHON=$(BIN)/python bash tests/asan.sh

$(VENV)/.%: $(PACKAGE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build data *.egg-info .hypothesis tarshards/*/*.so

.PHONY: demo test lint bench asan clean
.PRECIOUS: $(VENV)/.%
