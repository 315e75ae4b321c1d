# blufunc: set up, try, test and check. `make` lists the targets.
#
# Every target makes what it needs: .venv, and in it the packages of one extra of pyproject.toml. Stamp files
# in .venv/stamps remember what is installed, until pyproject.toml changes.

# Any Python from 3.11 on. Without PYTHON=..., the first of these that is new enough makes .venv.
PYTHON  ?=
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)

VENV    := .venv
PY      := $(VENV)/bin/python
STAMPS  := $(VENV)/stamps

PRESET  ?= tiny
OUT     ?= runs/demo
WORKERS ?= 2
PYTEST  ?=

# C++ and CUDA, which clang-format lays out.
C_FILES := $(shell find blufunc tests -name '*.h' -o -name '*.cuh')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many interpreters: none compiles what another has compiled.
export PYTHONDONTWRITEBYTECODE :=

# What was installed for an interpreter that no longer runs, or for this tree in another folder, is not installed.
ifneq ($(wildcard $(STAMPS)/venv),)
ifneq ($(shell $(PY) -c 'print("runs")' 2>/dev/null) $(shell cat $(STAMPS)/venv),runs $(realpath $(CURDIR)))
$(shell rm -rf $(STAMPS))
endif
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-more test-all test-peers check format docs docs-serve bench bench-gpu goldens clean

help: ## list the targets
	@echo "usage: make TARGET [PYTHON=python3.12]"
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' Makefile | expand -t 15

demo: $(STAMPS)/examples ## set up, train a small GPT, write its outputs to runs/demo
	$(PY) -m examples.gpt --preset $(PRESET) --out $(OUT)

RUN_TESTS = OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist worksteal

test: $(STAMPS)/dev ## set up, run a quick tier of the tests (PYTEST="-k name -x" adds options)
	$(RUN_TESTS) --tier=quick $(PYTEST)

test-more: $(STAMPS)/dev ## run what CI adds: a part of the tests that make test leaves out
	$(RUN_TESTS) --tier=more $(PYTEST)

test-all: $(STAMPS)/dev ## run all cases of all tests: an hour on 2 cores
	$(RUN_TESTS) $(PYTEST)

test-peers: $(STAMPS)/dev $(STAMPS)/peers $(STAMPS)/ecosystem ## run the tests that compare with JAX, and libraries for it
	$(PY) -m pytest -q -m peer -n $(WORKERS) --dist worksteal $(PYTEST)

check: $(STAMPS)/dev ## ruff, clang-format, mypy, import-linter and the word list
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(C_FILES)
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as main; main()' --no-logo --no-cache
	$(PY) -m tests.word_list

format: $(STAMPS)/dev ## let ruff and clang-format fix and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

# The reference calls each public function to show the shapes of its results: one thread is enough.
MKDOCS = NO_MKDOCS_2_WARNING=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(PY) -m mkdocs

docs: $(STAMPS)/docs ## build the site into site-build/: open site-build/index.html
	$(MKDOCS) build

docs-serve: $(STAMPS)/docs ## serve the site at http://127.0.0.1:8000, built anew when a page changes
	$(MKDOCS) serve

bench: $(STAMPS)/examples $(STAMPS)/peers ## measure against JAX on this machine, as ratios
	$(PY) -m benchmarks.suites.trace
	$(PY) -m benchmarks.suites.dispatch
	$(PY) -m benchmarks.suites.eager
	$(PY) -m benchmarks.suites.import_time
	$(PY) -m benchmarks.suites.cpu_kernels
	$(PY) -m benchmarks.suites.user_primitive
	$(PY) -m benchmarks.suites.loops
	$(PY) -m benchmarks.suites.small
	$(PY) -m benchmarks.suites.cpu_train

bench-gpu: $(STAMPS)/examples ## measure against PyTorch and JAX on a CUDA device, with what of them .venv has
	$(PY) -m benchmarks.suites.gpu
	$(PY) -m benchmarks.suites.gpu_attention
	$(PY) -m benchmarks.suites.gpt2_curves

goldens: $(STAMPS)/dev ## rewrite the golden files from what the code does now; read the diff
	BLUFUNC_UPDATE_GOLDENS=1 $(PY) -m pytest -q -k golden $(PYTEST)

clean: ## remove .venv, caches and build outputs, but not runs/
	rm -rf $(VENV) build dist site-build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------------- set-up

# The first candidate that is Python 3.11 or newer makes .venv. A .venv that came from elsewhere is kept when
# it works and is new enough, and rebuilt when not.
$(STAMPS)/venv:
	@new_enough='import sys; sys.exit(sys.version_info < (3, 11))'; \
	if ! { $(PY) -c "$$new_enough" && $(PY) -m pip --version >/dev/null; } 2>/dev/null; then \
	  chosen=; seen=; \
	  for p in $(PYTHONS); do \
	    v=$$($$p -c 'import platform; print(platform.python_version())' 2>/dev/null) || continue; \
	    if $$p -c "$$new_enough"; then chosen=$$p; break; fi; \
	    seen="$$seen $$p is $$v;"; \
	  done; \
	  if [ -z "$$chosen" ]; then \
	    echo "make: blufunc needs Python 3.11 or newer, and found none among: $(PYTHONS)." >&2; \
	    if [ -n "$$seen" ]; then echo "make:$${seen%;}." >&2; fi; \
	    echo "make: install one (https://www.python.org/downloads/), or name it: make PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	  fi; \
	  echo "make: making $(VENV) with $$chosen ($$v)"; \
	  if ! log=$$($$chosen -m venv --clear $(VENV) 2>&1); then \
	    printf '%s\n' "$$log" >&2; \
	    rm -rf $(VENV); \
	    echo "make: '$$chosen -m venv $(VENV)' failed; its own words are above." >&2; \
	    echo "make: most often the venv module is a package of its own: on Debian and Ubuntu 'apt install python3-venv'." >&2; \
	    echo "make: or use another Python: make PYTHON=/path/to/python3.12" >&2; \
	    exit 1; \
	  fi; \
	fi
	@mkdir -p $(STAMPS) && printf '%s\n' '$(realpath $(CURDIR))' >$@

# One stamp per extra: `make demo` installs what the examples need, and no test tools.
$(STAMPS)/%: pyproject.toml $(STAMPS)/venv
	@echo "make: installing blufunc[$*] into $(VENV) (the first time takes a minute or two)"
	@$(PY) -m pip install -qq -e '.[$*]' || { \
	  echo "make: pip could not install blufunc[$*]; its own words are above. Run make again to retry." >&2; exit 1; }
	@touch $@
