# Everything happens in .venv, which the first target makes by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
CPU_WHEELS := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-fast test-gpu lint format bench bench-gpu clean

demo: $(VENV)/installed
	rm -rf output/demo
	$(BIN)/dschat run --profile tiny --output output/demo --dashboard

# Two workers: many tests wait for processes that they start; more only get in each other's way.
test: $(VENV)/installed
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15

# A check while one works: all but the tests that are marked slow.
test-fast: $(VENV)/installed
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-gpu: $(VENV)/installed
	$(BIN)/pytest -m gpu

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Prints its table and writes it to output/bench-gpu.md.
bench-gpu: $(VENV)/installed
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf $(VENV)

# Without an NVIDIA GPU the CPU build of torch is enough; a bare torch would bring gigabytes of
# CUDA. It lies with some package mirrors, else in PyTorch's own index; elsewhere (macOS) the
# plain package is the CPU build.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	command -v nvidia-smi >/dev/null && $(PIP) torch==$(TORCH) \
	  || $(PIP) torch==$(TORCH)+cpu 2>/dev/null \
	  || $(PIP) torch==$(TORCH)+cpu --index-url $(CPU_WHEELS) \
	  || $(PIP) torch==$(TORCH)
	$(PIP) -e '.[dev]'
	touch $@
