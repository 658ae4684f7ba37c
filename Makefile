# make demo      the main job on real models, checked bit for bit
# make test      C++ tests, then Python tests
# make lint      formatters, linters, types
# make bench     copy paths side by side
# make clean     all that was built; the virtual environment stays until `make distclean`
#
# PYTHON=...       the interpreter to make the virtual environment with
# SYSTEM_SITE=1    use the torch (and whatever else) that this interpreter already has

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q

ifdef SYSTEM_SITE
VENV_OPTIONS := --system-site-packages
CONSTRAINTS :=
else
VENV_OPTIONS :=
CONSTRAINTS := -c constraints.txt
endif

EXTENSION_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.hpp') CMakeLists.txt setup.py pyproject.toml
PYTHON_SOURCES := shardsnap tests benchmarks examples setup.py
CXX_SOURCES := $(shell find csrc tests/cpp benchmarks -name '*.cpp' -o -name '*.hpp')
CXX_BUILD := build/tests
EMULATOR := $(CURDIR)/$(CXX_BUILD)/csrc/emulator/libshardsnap_emulated_cuda.so

.PHONY: demo test test-cpp test-python lint format bench clean distclean

demo: $(VENV)/.demo
	$(BIN)/python -m shardsnap demo

test: test-cpp test-python

test-cpp: $(CXX_BUILD)/.built
	ctest --test-dir $(CXX_BUILD) --output-on-failure

test-python: $(VENV)/.dev $(CXX_BUILD)/.built
	SHARDSNAP_EMULATOR_LIBRARY=$(EMULATOR) $(BIN)/python -m pytest $(PYTEST_OPTIONS)

lint: $(VENV)/.dev $(CXX_BUILD)/.built
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/mypy
	clang-format --dry-run -Werror $(CXX_SOURCES)
	run-clang-tidy -quiet -p $(CXX_BUILD) '/(csrc|tests/cpp)/' >$(CXX_BUILD)/tidy.log 2>&1 || { cat $(CXX_BUILD)/tidy.log; exit 1; }
	clang-tidy -quiet -p $(wildcard build/extension-*) --extra-arg=-Wno-ignored-optimization-argument csrc/bindings.cpp

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	clang-format -i $(CXX_SOURCES)

bench: $(VENV)/.dev
	mkdir -p build
	$(BIN)/python -m pytest benchmarks --benchmark-json=build/bench.json \
	  --benchmark-columns=min,median,iqr,rounds $(PYTEST_OPTIONS)

clean:
	rm -rf build dist *.egg-info shardsnap/_C.*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	rm -f $(VENV)/.demo $(VENV)/.dev

distclean: clean
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
ifdef SYSTEM_SITE
	# PYTHON may be in a virtual environment of its own, which --system-site-packages does not reach.
	$(PYTHON) -c 'import site; print("\n".join(site.getsitepackages()))' >$$(echo $(VENV)/lib/python*/site-packages)/base.pth
endif
	$(PIP) $(CONSTRAINTS) 'setuptools>=77' cmake ninja pybind11

# torch comes first and by itself: with it installed, nothing below can pull another one.
$(VENV)/.torch: $(BIN)/python constraints.txt
ifdef SYSTEM_SITE
	$(BIN)/python -c 'import torch' || { echo 'SYSTEM_SITE=1, but $(PYTHON) has no torch' >&2; exit 1; }
else
	$(PIP) $(CONSTRAINTS) torch
endif
	touch $@

$(VENV)/.demo: $(VENV)/.torch $(EXTENSION_SOURCES)
	$(PIP) $(CONSTRAINTS) --no-build-isolation -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(EXTENSION_SOURCES)
	$(PIP) $(CONSTRAINTS) --no-build-isolation -e '.[test,lint]'
	touch $@

$(CXX_BUILD)/.built: $(EXTENSION_SOURCES) $(wildcard tests/cpp/*)
	cmake -S . -B $(CXX_BUILD) -GNinja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DSHARDSNAP_BINDINGS=OFF -DSHARDSNAP_TESTS=ON
	cmake --build $(CXX_BUILD)
	touch $@
