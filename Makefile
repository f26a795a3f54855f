# Every target does its own set-up: a Rust toolchain and Python 3.10 or newer are all that is needed beforehand.
# Stamps in .venv remember what is done, so that a second run starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
MODEL := smollm2-135m
WHEELS := target/wheels
FAKECUDA := $(abspath target/fakecuda)
RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find crates -name '*.rs' -o -name Cargo.toml)
PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)

# The same for every cargo call, so that the crates that bind to Python are built once.
export PYO3_PYTHON := $(abspath $(BIN)/python)
export PYO3_BUILD_EXTENSION_MODULE := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.release-wheel ## Build the release wheel, fetch a small model, answer eight chats at once
	$(BIN)/octavo pull $(MODEL)
	$(BIN)/python examples/demo.py $(MODEL)

.PHONY: test
test: lint test-rust test-python test-cuda ## Set up, lint, and run cargo test and pytest

.PHONY: lint
lint: $(VENV)/.test-wheel ## Check formats, clippy, ruff, mypy and the stubs
	cargo fmt --all --check
	$(MAKE) --no-print-directory clippy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/stubtest octavo._octavo

.PHONY: clippy
clippy: | $(VENV)/.made
	cargo clippy --quiet --workspace --all-targets --locked -- -D warnings

.PHONY: test-rust
test-rust: $(VENV)/.test-wheel pull ## Run cargo test
	cargo test --workspace --locked

.PHONY: test-python
test-python: $(VENV)/.test-wheel pull ## Run pytest
	$(BIN)/python -m pytest tests --ignore=tests/long --ignore=tests/cuda

.PHONY: test-long
test-long: $(VENV)/.test-wheel pull ## Run the tests that are too slow for every change
	cargo test --workspace --locked --features long-tests long::
	$(BIN)/python -m pytest tests/long

.PHONY: kernels
kernels: $(VENV)/.nvrtc ## Compile the CUDA kernels for every architecture
	$(BIN)/python kernels/build.py --nvrtc $(VENV)/nvrtc --nvrtc-ptx $(VENV)/nvrtc-ptx --nvdisasm $(VENV)/nvdisasm --check-sass

# Conformance runs beside all else, and pytest in two processes. The kernels come from their folder, so that Python's module is not built twice.
CUDA_TEST = LD_LIBRARY_PATH=$(FAKECUDA) cargo test --locked -p octavo-cuda --features octavo-cuda/kernels
CUDA_PYTEST = LD_LIBRARY_PATH=$(FAKECUDA) OCTAVO_CUDA_KERNELS=target/kernels $(BIN)/python -m pytest tests/cuda -n 2 --dist loadgroup

.PHONY: test-cuda
test-cuda: kernels $(VENV)/.test-wheel pull ## Run the CUDA kernels and the whole engine on a driver that needs no GPU
	tools/fakecuda.sh
	cargo clippy --quiet --locked -p octavo-cuda --all-targets --features octavo-cuda/kernels -- -D warnings
	$(CUDA_TEST) --no-run
	$(CUDA_TEST) --test conformance > $(FAKECUDA)/conformance.log 2>&1 & conformance=$$!; \
	$(CUDA_TEST) -- --skip cuda_agrees_with_the_reference && $(CUDA_PYTEST); others=$$?; \
	wait $$conformance; conformance=$$?; cat $(FAKECUDA)/conformance.log; [ $$others = 0 ] && [ $$conformance = 0 ]

.PHONY: test-aarch64
test-aarch64: ## Run the backends' tests for 64-bit ARM in emulation
	tools/test_aarch64.sh target/aarch64

.PHONY: bench
bench: pull ## Run the criterion benchmarks
	cargo bench --package octavo-benches --locked

.PHONY: wheel
wheel: $(VENV)/.maturin kernels pull ## Build the manylinux wheel and the sdist; try both in clean environments
	$(PIP) install 'ziglang>=0.13,<1'
	rm -rf $(WHEELS)/manylinux
	PATH="$(abspath $(BIN)):$$PATH" maturin build --release --locked --features cuda-kernels --zig --compatibility manylinux_2_28 --out $(WHEELS)/manylinux
	$(BIN)/maturin sdist --out $(WHEELS)/manylinux
	tools/check_wheel.sh $(BIN)/python $(WHEELS)/manylinux $(MODEL)

.PHONY: fmt
fmt: | $(VENV)/.test-wheel ## Format Rust and Python
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: hooks
hooks: | $(VENV)/.test-wheel ## Install the pre-commit hooks
	$(PIP) install 'pre-commit>=4,<5'
	$(BIN)/pre-commit install

# Reads the sources, so that no wheel need be built first.
.PHONY: pull
pull: $(VENV)/.made ## Fetch the small model that demo, tests and benchmarks use
	PYTHONPATH=python $(BIN)/python -m octavo pull $(MODEL)

.PHONY: clean
clean: ## Remove everything that was built
	rm -rf $(VENV) target dist .mypy_cache .ruff_cache .pytest_cache
	find python -name '*.so' -delete

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else f"octavo needs Python 3.10 or newer; $(PYTHON) is {sys.version.split()[0]}")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.maturin: $(VENV)/.made Makefile
	$(PIP) install 'maturin>=1.9,<2' 'wheel>=0.45,<1'
	@touch $@

# NVIDIA's compiler, a library that needs neither a GPU nor a driver; of an older line too, for the PTX that older drivers take.
$(VENV)/.nvrtc: $(VENV)/.made Makefile
	$(PIP) install --no-deps --upgrade --target $(VENV)/nvrtc nvidia-cuda-nvrtc-cu12==12.9.86
	$(PIP) install --no-deps --upgrade --target $(VENV)/nvrtc-ptx nvidia-cuda-nvrtc-cu12==12.4.127
	$(PIP) install --no-deps --upgrade --target $(VENV)/nvdisasm 'nvidia-cuda-nvdisasm==13.2.*'
	@touch $@

# The two wheels share .venv: installing one takes the other's stamp away.
$(VENV)/.release-wheel: $(VENV)/.maturin $(RUST_SOURCES) $(PYTHON_SOURCES)
	rm -rf $(WHEELS)/release $(VENV)/.editable
	$(BIN)/maturin build --release --locked --out $(WHEELS)/release
	$(PIP) uninstall --yes octavo
	$(PIP) install $(WHEELS)/release/octavo-*.whl
	@touch $@

# Not maturin's build: that selects other features of the dependencies than `cargo test` does and would compile the heavy
# ones twice. This builds what `cargo test` runs and the extension in one go, and uses the Python files in place.
$(VENV)/.test-wheel: $(VENV)/.editable $(RUST_SOURCES)
	cargo build --quiet --workspace --locked --lib --bins --tests --examples
	install target/debug/lib_octavo.so python/octavo/_octavo.abi3.so
	@touch $@

# An editable wheel: the package's metadata, and a path to python/ instead of its files.
$(VENV)/.editable: $(VENV)/.maturin pyproject.toml Cargo.toml
	rm -rf $(WHEELS)/editable $(VENV)/.release-wheel
	$(BIN)/maturin pep517 write-dist-info --metadata-directory $(WHEELS)/editable/octavo
	echo $(abspath python) > $(WHEELS)/editable/octavo/octavo.pth
	$(BIN)/wheel pack $(WHEELS)/editable/octavo --dest-dir $(WHEELS)/editable
	$(PIP) uninstall --yes octavo
	$(PIP) install "$$(echo $(WHEELS)/editable/octavo-*.whl)[dev]"
	@touch $@
