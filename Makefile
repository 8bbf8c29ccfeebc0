# SPDX-License-Identifier: Apache-2.0
# make train   sets everything up and runs the main job
# make demo    trains for some steps with each schedule; timelines in runs/demo/report.html
# make test    sets everything up, lints, and runs the short unit tests and one proof of each engine
# make test-ci all tests but the nightly ones: what CI runs
# make test-nightly   the others, in parts (test-nightly-PART) that can be run one by one
# make test-openmpi, test-hosts, test-gpu   those of another MPI, of several hosts, of a GPU
# make test-megatron   proofs against megatron-core itself, which it installs
# make test-tuning   proofs with bitsandbytes, torchao and TRL, which it installs
# make test-elastic   kills of replicas that come and go
# make test-oldest, test-newest   unit tests with the oldest versions that are allowed, the newest
# make conformance DEEPSPEED_TESTS=FOLDER   DeepSpeed's own unit tests with our engines
# make docs    builds the site of the documentation into build/docs; make reference writes the tables
#              of keys in docs/configuration.md
# On Linux pip takes CUDA's build of torch. `make train CPU=1` takes that for CPUs, and the environment
# remembers it (`make train CPU=` turns back).
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
CPU    ?= $(if $(wildcard $(VENV)/.cpu),1)
BIN    := $(VENV)/bin
# pip would compile all files, for most of its time. Python compiles what is imported: the set-up ends
# with one import, so that a run's processes do not each compile the same.
PIP    := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile
# A stamp for what training needs, and one for what tests and documentation need beside it; other
# ones for each choice of torch: another one sets up again.
BUILD  := $(TORCH)$(if $(CPU), for CPUs)
CHOICE := $(shell echo '$(BUILD)' | cksum | cut -d' ' -f1)
READY  := $(VENV)/.ready-$(CHOICE)
DEV    := $(VENV)/.ready-dev-$(CHOICE)
# The extra of pyproject.toml that brings an MPI library.
MPI    ?= mpi
ARGS   ?=

export OMP_NUM_THREADS ?= 1
# An environment that forbids it would have each process compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup train demo test test-ci test-nightly test-mpi test-openmpi test-hosts test-megatron test-tuning test-elastic test-gpu test-oldest test-newest conformance docs reference lint clean
.DELETE_ON_ERROR:

setup: $(DEV)

# pip knows no build of a package; uv does, and where each of torch's is.
UV_TORCH := $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend=cpu $(TORCH)
INSTALL_TORCH := $(if $(CPU),$(INSTALL) uv && $(UV_TORCH),$(INSTALL) $(TORCH))

# torch goes first: what depends on it would pull another build.
$(READY): pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.ready-*
	test "$$(cat $(VENV)/.torch 2>/dev/null)" = '$(BUILD)' || $(PIP) uninstall --yes --quiet torch
	$(INSTALL_TORCH)
	echo '$(BUILD)' > $(VENV)/.torch
	$(if $(CPU),touch,rm -f) $(VENV)/.cpu
	$(INSTALL) --editable '.[$(MPI),report,sparse]'
	$(BIN)/python -c 'import datasets, deepspeed.runtime.pipe.engine, transformers.models.gpt2.modeling_gpt2' >/dev/null
	touch $@

$(DEV): $(READY)
	$(INSTALL) --editable '.[dev,$(MPI),report,sparse]'
	touch $@

train: $(READY)
	$(BIN)/wavemare train gpt $(ARGS)

DEMO := pipeline zero_bubble pipemare sparse wave
SET_pipeline := wavemare.pipeline.schedule=1f1b
SET_zero_bubble := wavemare.pipeline.schedule=zb-h1
SET_pipemare := wavemare.pipeline.schedule=pipemare
SET_sparse := wavemare.pipeline=null train_micro_batch_size_per_gpu=null \
    zero_optimization.stage=0 wavemare.sparse_collective.mode=auto
SET_wave := wavemare.pipeline=null wavemare.tensor_parallel.size=2 wavemare.wavelet.mode=sync
demo: $(READY)
	set -e; $(foreach each,$(DEMO),$(BIN)/wavemare train gpt -- --max_steps 20 --eval_samples 32 \
	    --output runs/demo/$(each) --set $(SET_$(each)) $(ARGS);)
	$(BIN)/wavemare report $(DEMO:%=runs/demo/%) --output runs/demo/report.html

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests/public_api.py

# The proofs of several ranks that `make test` runs, one of each engine.
CORE := $(addprefix tests/multiproc/test_,annotations.py initialize.py pipemare_equality.py resume.py \
        sparse_engine.py stock_equality.py train_batch.py wavelet.py)
# These have the machine for themselves at night.
ALONE := tests/mpi $(wildcard tests/e2e/test_bench*.py) tests/e2e/test_balance.py tests/e2e/test_soak.py

# Each run prints its longest tests and leaves junit XML in build/tests, named after the target.
pytest = $(BIN)/python -m pytest --durations=40 --junitxml=build/tests/$(@:test-%=%)$(1).xml
# Two tests at a time: most of them wait as long as they compute.
TWO := -n 2 --dist worksteal

test: lint
	$(call pytest) $(TWO) -m 'not nightly and not long' tests/unit $(CORE) $(ARGS)

test-ci: lint
	$(call pytest) $(TWO) -m 'not nightly and not spins' tests $(ARGS)
	$(call pytest,-alone) -m 'not nightly and spins' tests/mpi tests/e2e/test_bench.py $(ARGS)

# A part that has passed at this commit is not run again; `make clean` forgets it.
NIGHTLY := unit ranks commands pages alone
PASSED := build/tests/passed-$(shell git rev-parse --short HEAD 2>/dev/null)
test-nightly: $(NIGHTLY:%=test-nightly-%) test-hosts test-openmpi test-megatron test-tuning test-elastic

$(NIGHTLY:%=test-nightly-%): test-nightly-%: $(PASSED)-%

$(PASSED)-%: $(DEV)
	$(BIN)/python -m pytest --durations=40 --junitxml=build/tests/nightly-$*.xml \
	    -m nightly $(NIGHTLY_$*) $(ARGS)
	touch $@

NIGHTLY_unit := $(TWO) tests/unit
ELASTIC := tests/multiproc/test_quorum.py tests/multiproc/test_elastic.py
NIGHTLY_ranks := $(TWO) $(ELASTIC:%=--ignore=%) tests/multiproc
NIGHTLY_pages := $(TWO) tests/e2e/test_documentation.py
NIGHTLY_commands := $(TWO) $(ALONE:%=--ignore=%) --ignore=tests/e2e/test_documentation.py \
    --ignore=tests/e2e/test_hosts.py --ignore=tests/e2e/test_megatron_core.py tests/e2e
NIGHTLY_alone := $(ALONE)

test-mpi: $(DEV)
	$(call pytest) tests/mpi tests/e2e/test_launchers.py $(ARGS)

# The same with the other MPI, in an environment of its own.
test-openmpi:
	$(MAKE) VENV=.venv-openmpi MPI=openmpi test-mpi

# On two hosts with sshd, as namespaces: root, openssh-server, openssh-client, pdsh, iproute2.
test-hosts: $(DEV)
	$(call pytest) tests/e2e/test_hosts.py $(ARGS)

# Python 3.11 has megatron-core 0.16.1. For 0.19: make test-megatron PYTHON=python3.12 VENV=.venv-3.12
test-megatron: $(DEV)
	$(PIP) install --quiet --editable '.[megatron]'
	$(call pytest) -m nightly tests/e2e/test_megatron_core.py $(ARGS)

test-tuning: $(DEV)
	$(PIP) install --quiet --editable '.[bnb,torchao,trl]'
	$(call pytest) -m nightly tests/multiproc/test_tuning.py tests/e2e/test_tuning_pages.py tests/unit/data/test_row_format.py tests/unit/models/test_int8.py $(ARGS)

# Replicas that come and go, with real kills, one test at a time.
test-elastic: $(DEV)
	$(call pytest) $(ELASTIC) $(ARGS)

# The unit tests with the oldest versions that pyproject.toml allows, and with the newest ones.
test-oldest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-oldest test-newest: $(DEV)
	$(BIN)/uv venv --quiet --clear build/$@
	$(BIN)/uv pip install --quiet --python build/$@ --resolution $(RESOLUTION) --editable '.[dev,$(MPI),report,sparse]'
	build/$@/bin/python -m pytest -n 2 -m 'not nightly' tests/unit $(ARGS)

# Ranks share a GPU, as hosts do.
ON_GPU := $(addprefix tests/multiproc/test_,experts.py sparse_engine.py tensor_parallel.py \
    train_batch.py wavelet.py)
test-gpu: $(DEV)
	$(call pytest) -s tests/gpu $(ARGS)
	$(call pytest,-benchmark) tests/e2e/test_bench.py -k gpu_benchmark $(ARGS)
	TEST_ACCELERATOR=cuda $(call pytest,-ranks) -m 'not nightly' $(ON_GPU) $(ARGS)

# DeepSpeed's own unit tests with our initialize: DEEPSPEED_TESTS is the folder tests of its repository.
conformance: $(DEV)
	$(BIN)/python tests/tools/conformance.py $(DEEPSPEED_TESTS) $(ARGS)

docs: $(DEV)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

reference: $(DEV)
	$(BIN)/python docs/reference.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
