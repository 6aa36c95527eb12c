# Each of `make train` and `make test` is enough on a machine that has git, make and a Python from 3.11 to 3.13.
# The first run makes .venv and fills it; later runs reuse it. PYTHON=... chooses the interpreter, ARGS=... is passed on.

.PHONY: help train test lint format types wheel clean
.DEFAULT_GOAL := help
# Two targets at once would fill the same .venv.
.NOTPARALLEL:
export PYTHON

VENV_PYTHON := .venv/bin/python

help:
	@echo "make train    train the example language model, sharded over 8 devices    (ARGS=...)"
	@echo "make test     run the tests on the CPU                                    (ARGS=...)"
	@echo "make lint     check style and format"
	@echo "make format   put the code into the checked format"
	@echo "make types    check the types"
	@echo "make wheel    build the sdist and the wheel, install the wheel elsewhere, use it there"
	@echo "make clean    remove .venv and what the tools left behind"
	@echo "PYTHON=/path/to/python chooses the interpreter; otherwise the newest working one on the PATH is taken."

train:
	@.ci/venv examples,test
	$(VENV_PYTHON) examples/train_lm.py $(ARGS)

test:
	@.ci/venv examples,test,cuda-aot
	$(VENV_PYTHON) -m pytest -n 2 $(ARGS)

lint:
	@.ci/venv lint,package
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .

format:
	@.ci/venv lint,package
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

types:
	@.ci/venv lint,package
	$(VENV_PYTHON) -m pyright --pythonpath $(VENV_PYTHON)

wheel:
	@.ci/venv lint,package
	$(VENV_PYTHON) tests/packaging/check_wheel.py

clean:
	rm -rf .venv dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
