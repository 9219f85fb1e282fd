# SPDX-License-Identifier: Apache-2.0
# Every target does all set-up it needs, in .venv, once.
.PHONY: help setup test test-triton demo lint format bench

READY := .venv/.ready
PYTHON := .venv/bin/python
# The checkout's root stays off sys.path: its folder triton_kernels bears the name of a package that vLLM looks for.
export PYTHONSAFEPATH = 1

help:
	@echo "make demo    the same prompts through plain vLLM and through token trees, with a picture of one tree"
	@echo "make test    lint and all tests"
	@echo "make test-triton TRITON=3.6.0   the kernels' tests with another release of Triton"
	@echo "make lint    style checks only"
	@echo "make format  put the sources into the project's style"
	@echo "make bench   time trees, merges, proposers and compaction"
	@echo "make setup   only the set-up"

setup: $(READY)

$(READY): setup.py pyproject.toml specinfer_vllm/bench/setup_venv.py
	@for python in python3 python3.11 python3.12; do \
	  if $$python -c '' 2>/dev/null; then exec $$python specinfer_vllm/bench/setup_venv.py; fi; \
	done; echo "no python3 found: install Python 3.11 or 3.12" >&2; exit 1

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

test: lint
	$(PYTHON) -m pytest

# Beside the environment, not in it: vLLM's own Triton stays as it is.
TRITON ?= 3.6.0
OTHER_TRITON := .venv/triton-$(TRITON)

$(OTHER_TRITON): $(READY)
	$(PYTHON) -m pip install --quiet --no-deps --target $@ triton==$(TRITON)

test-triton: $(OTHER_TRITON)
	PYTHONPATH=$(OTHER_TRITON) $(PYTHON) -c "import triton; assert triton.__version__ == '$(TRITON)', triton.__file__"
	PYTHONPATH=$(OTHER_TRITON) $(PYTHON) -m pytest tests/test_triton_interpreter.py tests/test_triton_compile.py

demo: $(READY)
	$(PYTHON) -m specinfer_vllm.bench.demo

bench: $(READY)
	$(PYTHON) -m pytest --benchmark-enable --benchmark-only $(wildcard specinfer_vllm/bench/bench_*.py)
