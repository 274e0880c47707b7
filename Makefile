# make grpo SEED=2   set up, then train the tiny model and watch it learn
# make test          set up, then everything that CI checks
# make setup | lint | lab

PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin

.PHONY: setup grpo test lint lab

grpo: setup
	$(BIN)/papermill notebooks/04_grpo.ipynb -p seed $(SEED)

test: lint
	$(BIN)/pytest
	RLHELPERS_QUICK=1 $(BIN)/pytest --nbval notebooks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lab: setup
	$(BIN)/jupyter lab

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(f"Python {v[0]}.{v[1]} found; 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@
