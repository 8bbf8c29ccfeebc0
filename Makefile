# make train   sets everything up and runs the main job
# make test    sets everything up and passes the tests
# A GPU user names a torch build:  make train TORCH="torch --index-url URL-OF-THE-CUDA-BUILD"
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# One stamp for each choice of torch: another one sets up again.
READY  := $(VENV)/.ready-$(shell echo '$(TORCH)' | cksum | cut -d' ' -f1)
ARGS   ?=

export OMP_NUM_THREADS ?= 1

.PHONY: setup train test test-all lint clean
.DELETE_ON_ERROR:

setup: $(READY)

# torch goes first: what depends on it would pull another build.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.ready-*
	test "$$(cat $(VENV)/.torch 2>/dev/null)" = '$(TORCH)' || $(PIP) uninstall --yes --quiet torch
	$(PIP) install --quiet $(TORCH)
	echo '$(TORCH)' > $(VENV)/.torch
	$(PIP) install --quiet --editable '.[dev]'
	touch $@

train: $(READY)
	$(BIN)/wavemare train gpt $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Unit tests share the cores; the others start processes that use them.
test: lint
	$(BIN)/python -m pytest -n 2 tests/unit
	$(BIN)/python -m pytest -m 'not slow' tests/multiproc tests/e2e $(ARGS)

test-all: test
	$(BIN)/python -m pytest -m slow tests/unit tests/multiproc tests/e2e $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
