# SPDX-License-Identifier: Apache-2.0
# make train   sets everything up and runs the main job
# make test    sets everything up and passes the unit tests but the longest, and one proof of each engine
# make test-ci, test-all   all but the slow proofs, and all (what CI runs)
# make test-openmpi, test-hosts, test-gpu   those of another MPI, of several hosts, of a GPU
# make docs    builds the site of the documentation into build/docs; make reference writes the tables
#              of keys in docs/configuration.md
# A GPU user names a torch build:  make train TORCH="torch --index-url URL-OF-THE-CUDA-BUILD"
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# One stamp for each choice of torch: another one sets up again.
READY  := $(VENV)/.ready-$(shell echo '$(TORCH)' | cksum | cut -d' ' -f1)
# The extra of pyproject.toml that brings an MPI library.
MPI    ?= mpi
ARGS   ?=

export OMP_NUM_THREADS ?= 1

.PHONY: setup train test test-ci test-all test-mpi test-openmpi test-hosts test-gpu docs reference lint clean
.DELETE_ON_ERROR:

setup: $(READY)

# torch goes first: what depends on it would pull another build.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.ready-*
	test "$$(cat $(VENV)/.torch 2>/dev/null)" = '$(TORCH)' || $(PIP) uninstall --yes --quiet torch
	$(PIP) install --quiet $(TORCH)
	echo '$(TORCH)' > $(VENV)/.torch
	$(PIP) install --quiet --editable '.[dev,$(MPI)]'
	touch $@

train: $(READY)
	$(BIN)/wavemare train gpt $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Of what several ranks must do, a proof of each engine.
CORE := $(addprefix tests/multiproc/test_,annotations.py initialize.py pipemare_equality.py resume.py \
        sparse_engine.py stock_equality.py train_batch.py wavelet.py)

# They measure times, or their ranks never sleep.
ALONE := tests/mpi $(wildcard tests/e2e/test_bench*.py) tests/e2e/test_balance.py tests/e2e/test_soak.py
TOGETHER := $(ALONE:%=--ignore=%) tests/multiproc tests/e2e
PYTEST := $(BIN)/python -m pytest
# Two tests at a time: most of them wait as long as they compute.
TWO := $(PYTEST) -n 2 --dist worksteal

test: lint
	$(TWO) -m 'not slow and not long' tests/unit
	$(TWO) -m 'not slow' $(CORE) $(ARGS)

test-ci: test
	$(PYTEST) -n 2 --dist loadfile -m long tests/unit
	$(TWO) -m 'not slow' $(CORE:%=--ignore=%) $(TOGETHER) $(ARGS)
	$(PYTEST) -m 'not slow' $(ALONE) $(ARGS)

test-all: test-ci
	$(TWO) -m slow tests/unit
	$(TWO) -m slow $(TOGETHER) $(ARGS)
	$(PYTEST) -m slow $(ALONE) $(ARGS)

test-mpi: $(READY)
	$(PYTEST) tests/mpi tests/e2e/test_launchers.py $(ARGS)
	$(PYTEST) tests/e2e/test_restart.py -k supervisor $(ARGS)

# The same with the other MPI, in an environment of its own.
test-openmpi:
	$(MAKE) VENV=.venv-openmpi MPI=openmpi test-mpi

# On two hosts with sshd, as namespaces: root, openssh-server, openssh-client, pdsh, iproute2.
test-hosts: $(READY)
	$(PYTEST) tests/e2e/test_hosts.py $(ARGS)

test-gpu: $(READY)
	$(PYTEST) -s tests/gpu $(ARGS)

docs: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

reference: $(READY)
	$(BIN)/python docs/reference.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
