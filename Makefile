# The commands: demo, test, test-interop, soak, lint, bench, asan, programs. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := setup.cfg setup.py pyproject.toml $(wildcard tarshards/*/*.[ch])

demo: $(VENV)/.demo
	$(BIN)/python notebooks/digits.py

# The laws of the package itself.
test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto -m "not interop" $(PYTEST)

# Foreign packages and servers: DALI, Dask, Kubernetes' schema and client, S3, Slurm.
test-interop: $(VENV)/.interop
	$(BIN)/python -m pytest -n auto -m interop $(PYTEST)

# Long schedules, fuzzing and kills: the property tests and the kills of `make test`, SOAK times as many of each.
SOAK ?= 20
soak: $(VENV)/.test
	TARSHARDS_SOAK=$(SOAK) $(BIN)/python -m pytest -n auto -m "(hypothesis or soak) and not interop" $(PYTEST)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All of them, or one: make bench ONLY=core; a task or program by its name; the suite with some peers: PEERS=a,b
bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py $(ONLY) $(PEERS:%=--peers=%)

asan: $(VENV)/.test
	PYTHON=$(BIN)/python bash tests/asan.sh

# The programs that the tests compare with, by apt, as root or with sudo.
programs:
	bash tests/programs.sh

$(VENV)/.%: $(PACKAGE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build data *.egg-info .hypothesis tarshards/*/*.so

.PHONY: demo test test-interop soak lint bench asan programs clean
.PRECIOUS: $(VENV)/.%
