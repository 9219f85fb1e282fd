# SPDX-License-Identifier: Apache-2.0
# Every target does all set-up it needs, in .venv, once.
.PHONY: help setup test demo lint format bench

READY := .venv/.ready
PYTHON := .venv/bin/python
# The checkout's root stays off sys.path: its folder triton_kernels bears the name of a package that vLLM looks for.
export PYTHONSAFEPATH = 1

help:
	@echo "make demo    the same prompts through plain vLLM and through token trees, with a picture of one tree"
	@echo "make test    lint and all tests"
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

demo: $(READY)
	$(PYTHON) -m specinfer_vllm.bench.demo

bench: $(READY)
	$(PYTHON) -m pytest --benchmark-enable --benchmark-only
