# What a developer types: `make help` lists it. Every target works in .venv, which the first one makes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DOCS_STAMP := $(VENV)/installed-docs
PYTEST := $(BIN)/python -m pytest
WORKERS ?= 2
SANITIZER ?= compute-sanitizer
STEP_SECONDS ?= 480

# All four said, so that `accelerate launch` neither asks nor prints a warning about defaults.
LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no
DEMO_ARGS ?=
SWEEP_ARGS ?=
BENCHMARKS ?= $(addprefix speed., adaptation decomposition head inference linear lookup step) kernels.run memory.run \
	$(addprefix quality., run ranks optimizer_states)
# `make check` runs these, so what comes after it leaves them out.
LAYOUT := tests/test_import_direction.py

.DEFAULT_GOAL := help
.PHONY: help install demo docs notebooks check format test test-slow test-gpu sanitize-gpu gpu-report bench sweep clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "Another interpreter: make test PYTHON=python3.12"

install: $(STAMP)  ## make .venv and install the project in it with the tested versions

demo: $(STAMP)  ## pre-train a small tensor-train language model on Python code, under ten minutes on 2 cores
	$(LAUNCH) scripts/pretrain_codebert.py $(DEMO_ARGS)

docs: $(DOCS_STAMP)  ## build the site into build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

notebooks: $(DOCS_STAMP)  ## execute the notebooks of docs/ anew and keep their outputs
	PYTHONWARNINGS=ignore $(BIN)/python -m nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

check: $(STAMP)  ## style, spelling, types and import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/typos
	$(BIN)/mypy
	$(PYTEST) -q --noconftest $(LAYOUT)

format: $(STAMP)  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: check  ## `make check`, then the tests: CPU only, no network
	$(PYTEST) -n $(WORKERS) --dist loadfile --ignore $(LAYOUT)

test-slow: check  ## the same with the slow tests
	$(PYTEST) -n $(WORKERS) --dist loadfile --ignore $(LAYOUT) -m "not gpu and not network"

test-gpu: $(STAMP)  ## the tests that need a CUDA device, alone
	$(PYTEST) -m gpu

# Without torch's cache a tool sees where each tensor ends and what was never written, but no graph can be captured.
sanitize-gpu: $(STAMP)  ## the tests of the kernels on a GPU under compute-sanitizer, with each of its four tools
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --error-exitcode 1 $(PYTEST) -m gpu tests/kernels \
		-k "not captured"
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool initcheck --error-exitcode 1 $(PYTEST) -m gpu tests/kernels \
		-k "not captured"
	$(SANITIZER) --tool racecheck --error-exitcode 1 $(PYTEST) -m gpu tests/kernels
	$(SANITIZER) --tool synccheck --error-exitcode 1 $(PYTEST) -m gpu tests/kernels

# The interpreter as it is given: a machine with a GPU may have packages of its own, and no network to make .venv from.
gpu-report:  ## all figures of a GPU, with PYTHON itself; call it until it is complete. REHEARSE=1: on a CPU
	$(PYTHON) -m benchmarks.gpu.report --seconds $(STEP_SECONDS) --sanitizer "$(SANITIZER)" $(if $(OUT),--out "$(OUT)") \
		$(if $(WORK),--work "$(WORK)") $(if $(ONLY),--only $(ONLY)) $(if $(REHEARSE),--rehearse)

bench: $(STAMP)  ## run every benchmark, one after the other; BENCHMARKS="speed.step kernels.run": these
	@set -e; for name in $(BENCHMARKS); do echo "benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name; done

sweep: $(STAMP)  ## check every architecture of Transformers, about an hour; goes on where it was stopped
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.architectures.sweep $(SWEEP_ARGS)

clean:  ## remove .venv and what builds and tools leave behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(STAMP): pyproject.toml setup.cfg constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Install Python 3.10 or newer, or name one that \
	is there: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "hf_comera needs Python 3.10 or newer, but \
	$(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1). Name a newer one: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[onnx,plots,scripts,test]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
