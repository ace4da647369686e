# `make demo` sets everything up and shows the main job; `make test` passes the checks. Both make their own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
# Without an NVIDIA GPU, take the CPU build of torch: the default one pulls gigabytes of CUDA on Linux.
CPU_ONLY := $(shell test "$$(uname -s)" = Linux && ! command -v nvidia-smi >/dev/null && echo yes)

.PHONY: demo test slow gpu sanitize style docs format clean

demo: $(VENV)/package
	$(BIN)/tq-cache demo

test: $(VENV)/ready style
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

# lm-eval only here: it brings scikit-learn, which transformers then imports, in every process that a test starts.
slow: $(VENV)/ready
	$(BIN)/pip install -q --editable ".[eval]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow and not gpu"

gpu:
	$(PYTHON) -m pytest -m gpu

sanitize:
	PYTHON=$(PYTHON) bash scripts/sanitize.sh build/sanitize

style: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache

# What the package needs, for the demo: without bytecode, since that of all files takes longer than what is imported.
$(VENV)/package: pyproject.toml
	$(PYTHON) -m venv $(VENV)
ifeq ($(CPU_ONLY),yes)
	$(BIN)/pip install -q --no-compile torch==$(TORCH)+cpu || \
	  $(BIN)/pip install -q --no-compile --index-url https://download.pytorch.org/whl/cpu torch==$(TORCH)+cpu
else
	$(BIN)/pip install -q --no-compile "torch>=2.11"
endif
	$(BIN)/pip install -q --no-compile --editable .
	touch $@

# And what tests, types, style and the site need.
$(VENV)/ready: $(VENV)/package
	$(BIN)/pip install -q --editable ".[dev,docs]"
	touch $@
