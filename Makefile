# Everything runs in one virtual environment that this file makes. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
# Processes that run tests. Each builds the small bundles that it needs, so more than a few gain little.
TEST_PROCESSES ?= 2
GPU_REPORT ?= gpu-report
GPU_EXTRAS ?= cpu,rtx
comma := ,
GPU_STAMP := .installed-gpu-check-$(subst $(comma),-,$(GPU_EXTRAS))

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check distill-smoke gpu-check clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 14

demo: $(VENV)/.installed  ## fetch a real model, build its bundle, measure plain and speculative decoding
	$(VENV)/bin/xpress-export demo

test: check  ## check, then every test but those marked slow
	$(VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup -m "not slow and not gpu"

test-all: check $(VENV)/.installed-all  ## check, then every test that needs no GPU
	$(VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup -m "not gpu"

check: $(VENV)/.installed-dev  ## linter, formatting, types
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

distill-smoke: $(VENV)/.installed-dev  ## train a drafter for a tiny random target with the recipe in examples/distill, and measure it
	$(VENV)/bin/python -m pytest tests/distill/test_chain.py -k "trained_on or evaluation or card"

# GPU_EXTRAS=gpu checks TensorRT and ONNX Runtime's CUDA provider; not in one environment with cpu, so give it a VENV of its own.
gpu-check: $(VENV)/$(GPU_STAMP)  ## on a machine with a GPU: check engines, tokens, times and memory; the report is in GPU_REPORT
	$(VENV)/bin/python benchmarks/gpu_check.py --output $(GPU_REPORT)

clean:  ## back to a fresh clone; the demo's download cache outside the checkout stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find xpress_export engines runtime tests examples -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamps say what is installed. They are written last, so an interrupted installation is taken up again.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e '.[cpu,export]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e '.[cpu,export,rtx,serve,distill,dev]'
	touch $@

$(VENV)/.installed-all: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e '.[cpu,export,rtx,serve,ray,distill,dev]' 'tritonclient[grpc]>=2.50'
	touch $@

$(VENV)/$(GPU_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e '.[export,dev,$(GPU_EXTRAS)]'
	touch $@
