# Set-up, demo, tests and linters. `make demo` and `make test` need nothing but Python 3.11 or 3.12, make and a C++17 compiler.

# The interpreter that makes the virtual environment; override it with `make PYTHON=/path/to/python3.12 demo`.
SUPPORTED := import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell for name in python3 python3.12 python3.11; do \
	if $$name -c '$(SUPPORTED)' 2>/dev/null; then echo $$name; break; fi; done)
endif

VENV := .venv
BIN := $(VENV)/bin
CLANG_FORMAT := $(BIN)/clang-format
CPP_BUILD := setup.py pyproject.toml $(wildcard runtime_ext/*.cpp runtime_ext/*.h)
CPP_FORMATTED := $(wildcard runtime_ext/*.cpp runtime_ext/*.h tests/cpp/*.cpp tests/cpp/*.h)
# Threads that wait for one another give their core up: the lanes need it, and so may other processes.
export OMP_WAIT_POLICY ?= passive
PYTEST_ARGUMENTS ?= --numprocesses auto
DEMO_ARGUMENTS ?=

# Each stamp is newer than all that its step read, so that a step is repeated only when something it reads has changed.
CREATED := $(VENV)/.created
DEMO_PINS := $(VENV)/.demo-pins
DEVELOPMENT_PINS := $(VENV)/.development-pins
BUILT := $(VENV)/.built
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: help demo test lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    set up and train the main example (DEMO_ARGUMENTS='--compare' ...)"
	@echo "make test    set up and run the tests (PYTEST_ARGUMENTS='-k gpt' ...)"
	@echo "make lint    check style, types and C++ formatting"
	@echo "make format  rewrite sources in that style"
	@echo "make clean   remove everything that make made"

demo: $(BUILT)
	$(BIN)/python examples/train_gpt.py $(DEMO_ARGUMENTS)

# Inductor compiles in the tests' own processes, of which there is one a core already.
test: $(DEVELOPMENT_PINS) $(BUILT)
	TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGUMENTS)

lint: $(DEVELOPMENT_PINS) build/types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/types $(BIN)/mypy -p megatrain_fx
	$(if $(CPP_FORMATTED),$(CLANG_FORMAT) --dry-run -Werror $(CPP_FORMATTED))

format: $(DEVELOPMENT_PINS)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(if $(CPP_FORMATTED),$(CLANG_FORMAT) -i $(CPP_FORMATTED))

clean:
	rm -rf $(VENV) build runs *.egg-info megatrain_fx/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@$(if $(PYTHON),,echo "No Python 3.11 or 3.12 was found on PATH: install one, or name it with PYTHON=." >&2; exit 1)
	@$(PYTHON) -c '$(SUPPORTED)' || \
		{ echo "$(PYTHON) is not Python 3.11 or 3.12: name another with PYTHON=." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(DEMO_PINS): $(CREATED) requirements/demo.txt requirements/constraints.txt
	$(INSTALL) -r requirements/demo.txt -c requirements/constraints.txt
	@touch $@

$(DEVELOPMENT_PINS): $(DEMO_PINS) requirements/development.txt
	$(INSTALL) -r requirements/development.txt -c requirements/constraints.txt
	@touch $@

# torch must be the one in the environment, hence no build isolation; the build finds ninja on PATH.
$(BUILT): $(DEMO_PINS) $(CPP_BUILD)
	PATH="$(abspath $(BIN)):$$PATH" $(INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

# The package as it looks when installed, for the type checker: passes/ stands outside megatrain_fx/ in the sources.
.PHONY: build/types
build/types:
	@rm -rf $@ && mkdir -p $@/megatrain_fx
	@ln -s $(abspath passes) $(abspath megatrain_fx/optim) $(wildcard $(abspath megatrain_fx)/*.py $(abspath megatrain_fx)/*.pyi \
		$(abspath megatrain_fx)/py.typed) $@/megatrain_fx/
