# Two commands for users: `make demo` and `make test`. Both make .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check
CPU_TORCH := torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test format clean

demo: .venv/for-use
	$(BIN)/lss train configs/demo.toml

test: .venv/for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/pytest --numprocesses 2 --dist worksteal

format: .venv/for-tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv

# Without a GPU the CPU build of torch is installed first: the default one for Linux brings gigabytes of CUDA.
.venv/for-use: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "lss needs Python 3.11 or later; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv
	@echo "installing torch and the package (a minute or two) ..."
	@command -v nvidia-smi >/dev/null \
		|| $(PIP) --retries 0 --index-url $(CPU_INDEX) $(CPU_TORCH) 2>/dev/null \
		|| $(PIP) $(CPU_TORCH)
	@$(PIP) -e .
	@touch $@

.venv/for-tests: .venv/for-use
	@echo "installing the tools of the tests ..."
	@$(PIP) -e '.[dev]'
	@touch $@
