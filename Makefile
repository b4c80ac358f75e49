# Everything a developer does here. Each target makes .venv when it is missing and installs what is needed;
# only make and a Python >= 3.11 have to be there. `make test ARGS="-k rollback -x"` hands ARGS on.

.DEFAULT_GOAL := help
.PHONY: help demo test test-all torture check format bench bench-soak docs clean

# The first interpreter that really runs, is new enough and can make environments. (A version manager leaves
# launchers on the path for versions that are not active; those fail here and are passed by.)
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$name"; break; }; done)

VENV := .venv
RUN := $(VENV)/bin
# Named by content, so that a checkout which only moves file times installs nothing.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')
ARGS ?=

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP):
	@if ! $(RUN)/python -m pip --version >/dev/null 2>&1; then \
		if [ -z "$(PYTHON)" ]; then \
			echo "error: no Python >= 3.11 with venv and ensurepip on the path; install one (Debian, Ubuntu:" \
				"apt-get install python3-venv) or name it: make PYTHON=/path/to/python" >&2; exit 1; \
		fi; \
		echo "making $(VENV) with $$($(PYTHON) --version)"; \
		"$(PYTHON)" -m venv --clear $(VENV); \
	fi
	@echo "installing the tested packages into $(VENV)"
	@$(RUN)/python -m pip install --disable-pip-version-check --progress-bar off -qq -c constraints.txt -e '.[dev]' \
		$$(command -v cc >/dev/null || echo ziglang)  # a C compiler as a package: the crash tests build a small library
	@rm -f $(VENV)/.installed-* && touch $@

demo: $(STAMP) ## Train CartPole on four Ray workers, break the policy, roll back, print the audit
	@$(RUN)/python docs/examples/cartpole_rollback.py $(ARGS)

test: $(STAMP) ## Run the tests, all but those marked long: in two processes, of which one has the cluster
	@$(RUN)/python -m pytest --session-timeout=4800 -n 2 --dist loadgroup $(ARGS)

test-all: $(STAMP) ## Run what `make test` leaves out: the tests marked long
	@$(RUN)/python -m pytest --session-timeout=4800 -m long $(ARGS)

# A test marked torture draws its cases from a seed: a small share of them in `make test`; all of them, or many more,
# where WEIGHTLEDGER_TORTURE=1.
torture: $(STAMP) ## Run the tests marked torture with all their cases: crashes, disk errors, damage, fuzz
	@WEIGHTLEDGER_TORTURE=1 $(RUN)/python -m pytest --session-timeout=4800 -m torture $(ARGS)

check: $(STAMP) ## Lint, format, types (mypy strict, pyright), import rules
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(RUN)/pyright --version >/dev/null || { \
		echo "error: pyright finds no node to run on; install Node.js, or pip install 'pyright[nodejs]'" >&2; exit 1; }
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(RUN)/pyright
	$(RUN)/python -m pytest -q tests/test_imports.py

format: $(STAMP) ## Sort imports and format in place
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench: $(STAMP) ## Measure what docs/design promises, print and save the ratios
	@$(RUN)/python -m tests.benchmarks $(ARGS)

bench-soak: $(STAMP) ## Publish and roll back for a long time, watching memory and the object store
	@$(RUN)/python -m tests.benchmarks soak $(ARGS)

docs: $(STAMP) ## Build the documentation into site/, every warning an error
	@NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict $(ARGS)

clean: ## Remove what the targets made, .venv apart
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
