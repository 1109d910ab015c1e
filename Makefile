# Each target makes the virtual environment by itself. A fresh machine needs Python 3.11 or later
# with venv, and a C++17 compiler; `make demo` and `make test` do the rest.

PYTHON ?= python3
VENV   ?= .venv
ifeq ($(origin CXX),default)
CXX    := c++
endif
# Installed only where the environment has no torch >= 2.11. For the smaller build without CUDA:
#   make TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" test
TORCH  ?= torch==2.13.0
RESULT ?= benchmarks/results/latest.json
# Fetched for the emulated CUDA where the environment's own torch has none, 0.6 GB. Of what torch links to the
# emulation has stand-ins.
CUDA_TORCH ?= torch==2.14.1 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85
# The Python of the machine for which `gpu-wheels` fetches packages.
GPU_PYTHON ?= 3.12
# Processes that share the tests, each with one torch thread and about a gigabyte.
JOBS   ?= 2
# Containers often set it, and then each process compiles all the modules it imports, torch's too: 6 s.
unexport PYTHONDONTWRITEBYTECODE

BIN     := $(VENV)/bin
# Errors alone: what pip warns of is its own configuration, not this project's. Python compiles a module
# when it is first imported; pip would compile all of torch, four times the time of unpacking it.
PIP     := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile
INSTALL := $(PIP) --no-deps --force-reinstall $(VENV)/wheel/*.whl
# Exact versions of what the environment installs beside torch: one file for each set of extras.
LOCKS   ?= locks
# Exits with 0 where there is a torch >= 2.11. The environment then uses the machine's own torch.
HAS_TORCH := import sys, torch; sys.exit([int(n) for n in torch.__version__.split(".")[:2]] < [2, 11])
HAS_CUDA  := import sys, torch; sys.exit(torch.version.cuda is None)
# What the installed package is made of; a change of one reinstalls it.
SOURCES := $(shell find src csrc -type f -not -name '*.pyc' -not -name '*.so') pyproject.toml CMakeLists.txt README.md LICENSE
CPP     := $(wildcard $(foreach folder,csrc csrc/* tests/support/emulated_cuda,$(folder)/*.cc $(folder)/*.h))
# torch is the machine's own or $(TORCH), so no lock has it, nor what only it needs.
COMPILE := printf '%s ; python_version < "3"\n' torch torchvision | $(BIN)/uv pip compile --quiet \
  --upgrade --universal --python-version 3.11 --no-annotate --no-header --override - pyproject.toml
# The tests that reach the C++ core and need no torch.
CORE_TESTS := tests/records tests/problem tests/placers

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all covered test-core test-nightly test-latest test-emulated test-ecosystem mutants lock check bench gpu-check gpu-check-emulated gpu-wheels sanitize clean

help: ## Show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	  awk -F '|' '{ printf "%-24s%s\n", $$1, $$2 }'

demo: $(VENV)/.installed ## Split GPT-2 and Inception-v3 over CPU devices and train them
	$(BIN)/baechi demo

test: $(VENV)/.dev ## Run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
	  -m "not gpu and not multigpu and not slow and not kubernetes and not covered"

test-all: $(VENV)/.dev ## Run the tests, those too that run what others run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

covered: $(VENV)/.dev ## Choose which tests `make test` leaves to `make test-all`, by their coverage
	@$(PIP) pytest-cov
	OMP_NUM_THREADS=1 $(BIN)/python tests/selection/choose.py

test-latest: ## Run test-all on the newest versions of all packages but torch
	rm -rf .venv-latest
	$(MAKE) VENV=.venv-latest LOCKS=.venv-latest/locks lock
	$(MAKE) VENV=.venv-latest LOCKS=.venv-latest/locks test-all

lock: $(VENV)/.created ## Write the newest versions of all packages to locks/
	@$(PIP) uv
	@mkdir -p $(LOCKS)
	$(COMPILE) --extra dev -o $(LOCKS)/dev.txt
	$(COMPILE) --extra demo -c $(LOCKS)/dev.txt -o $(LOCKS)/demo.txt
	$(COMPILE) --extra build -c $(LOCKS)/dev.txt -o $(LOCKS)/build.txt
	$(COMPILE) --extra ecosystem -c $(LOCKS)/dev.txt -o $(LOCKS)/ecosystem.txt

test-core: $(VENV)/.dev ## Run the tests of the solver and its C++ core, which need no torch
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(CORE_TESTS)

# The benchmarks' own tests, too, and those of GPUs; every random test makes eight to ten times the cases.
test-nightly: $(VENV)/.dev ## Run all tests, those that are too slow for CI too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
	  --hypothesis-profile nightly -o budget_s=0 -m "not gpu and not multigpu and not kubernetes" \
	  tests docs README.md baechi $(wildcard benchmarks/*/test_*.py) benchmarks/test_commands.py
	$(MAKE) test-emulated
	$(MAKE) sanitize SANITIZED_CASES="not slow"

test-ecosystem: $(VENV)/.ecosystem ## Run placed models in the loops of other libraries, and the recipes
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -o budget_s=0 -m "not gpu and not multigpu and not kubernetes" \
	  tests/ecosystem docs/recipes

mutants: $(VENV)/.dev ## Break the code in a hundred places, one after another: the tests must notice each
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/run.py

EMULATED := PYTHONPATH=$(VENV)/cuda-torch EMULATED_CUDA_DEVICES=2 $(BIN)/python tests/support/emulated_cuda/run.py
# Without the two tests whose matrices are too large for a CPU.
test-emulated: $(VENV)/.cuda-torch ## Run the tests of GPUs on an emulated CUDA
	$(EMULATED) -m pytest -n $(JOBS) -o budget_s=0 \
	  -m "gpu or multigpu" -k "not allocator_holds and not more_work" tests

check: $(VENV)/.dev ## Lint, format, types; the build has C++ warnings as errors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)

bench: $(VENV)/.dev ## Run the benchmarks; the numbers go to benchmarks/results/
	$(BIN)/python -m pytest benchmarks --benchmark-json=$(RESULT)

gpu-check-emulated: $(VENV)/.cuda-torch ## Run what gpu-check runs, at small sizes, on an emulated CUDA
	$(EMULATED) -m benchmarks.gpu_check --quick --patience 5 --out build/gpu-check

gpu-check: $(VENV)/.dev ## Check Baechi on the GPUs of this machine, in ten minutes
	$(BIN)/python -m benchmarks.gpu_check

# Of what a machine needs that has a torch of its own, and no network (docs/gpus.md).
gpu-wheels: $(VENV)/.created ## Fetch to wheels/ what a machine without network needs for gpu-check
	$(BIN)/python -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: \
	  --python-version $(GPU_PYTHON) --dest wheels -c $(LOCKS)/dev.txt \
	  -r $(LOCKS)/demo.txt -r $(LOCKS)/build.txt iniconfig pluggy pytest pytest-xdist execnet

# A second build of the package, with sanitizers, beside the first. Leaks are not looked for: the
# interpreter itself keeps memory to its end.
# An editable install comes before PYTHONPATH, and its core has no sanitizers: `CHECKED` looks for their
# calls in the core that is imported, so that no test passes on the wrong one.
CHECKED := import pathlib, sys, baechi._core as core; path = pathlib.Path(core.__file__); \
  sys.exit(None if b"__asan_init" in path.read_bytes() else f"{path} has no sanitizers; is baechi installed as editable? make clean, then make sanitize")
SANITIZED := LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 PYTHONPATH=build/sanitized $(BIN)/python
# At night those, too, that run no line of C++ that the others don't.
SANITIZED_CASES ?= not slow and not unsanitized
# Without the tests of other solvers, whose libraries have no sanitizers.
sanitize: $(VENV)/.dev ## Run the tests of the C++ core under the address and undefined-behavior sanitizers
	rm -rf build/sanitized
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --no-deps --target build/sanitized . \
	  --config-settings=build-dir=build/sanitize --config-settings=cmake.define.BAECHI_SANITIZE=ON
	$(SANITIZED) -c '$(CHECKED)'
	$(SANITIZED) -m pytest $(CORE_TESTS) --hypothesis-profile sanitized -o budget_s=0 \
	  --ignore tests/placers/test_linear_programs.py -m "$(SANITIZED_CASES)"

clean: ## Remove what make made, the virtual environment too
	rm -rf $(VENV) build dist baechi-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Baechi needs Python 3.11 or later; '$(PYTHON)' is no such Python." \
	    "Install one and name it: make PYTHON=python3.12"; exit 1; }
	@command -v $(CXX) > /dev/null || { \
	  echo "Baechi needs a C++17 compiler; '$(CXX)' is not there." \
	    "Install one (Debian: apt install g++; macOS: xcode-select --install) or name it: make CXX=clang++"; \
	  exit 1; }
	@site=; $(PYTHON) -c '$(HAS_TORCH)' 2> /dev/null && site=--system-site-packages; \
	  $(PYTHON) -m venv $$site $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian: apt install python3-venv."; exit 1; }
	@touch $@

$(VENV)/.build: $(VENV)/.created $(LOCKS)/build.txt
	@$(PIP) -r $(LOCKS)/build.txt
	@touch $@

$(VENV)/.torch: $(VENV)/.build
	@$(BIN)/python -c '$(HAS_TORCH)' 2> /dev/null || $(PIP) -c $(LOCKS)/dev.txt $(TORCH)
	@touch $@

# Without build isolation, which would fetch the newest tools at each installation. Beside what else
# is installed with `make -j2`.
$(VENV)/.wheel: $(VENV)/.build $(SOURCES)
	@rm -rf $(VENV)/wheel
	@CXX="$(CXX)" PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel -qq --no-build-isolation \
	  --no-deps --config-settings=cmake.define.BAECHI_WERROR=ON --wheel-dir $(VENV)/wheel .
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(VENV)/.wheel $(LOCKS)/demo.txt
	@$(PIP) -r $(LOCKS)/demo.txt
	@$(INSTALL)
	@touch $@

$(VENV)/.packages: $(VENV)/.torch $(LOCKS)/dev.txt
	@$(PIP) -r $(LOCKS)/dev.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.packages $(VENV)/.wheel
	@$(INSTALL)
	@touch $@

$(VENV)/.cuda-torch: $(VENV)/.dev
	@$(BIN)/python -c '$(HAS_CUDA)' || $(PIP) --no-deps --target $(VENV)/cuda-torch $(CUDA_TORCH)
	@touch $@

# Without dependencies: the lock has them all but torch, and pip would exchange a torch that fits no
# longer. timm imports torchvision, whose binaries fit one torch alone: where those of $(TORCH) do not
# load they go again, since they would break every other package that looks for it, and timm is skipped.
$(VENV)/.ecosystem: $(VENV)/.dev $(LOCKS)/ecosystem.txt
	@$(PIP) --no-deps -r $(LOCKS)/ecosystem.txt
	@$(BIN)/python -c 'import torchvision' 2> /dev/null || \
	  $(PIP) --no-deps $(subst torch==2.13.0,torchvision==0.28.0,$(TORCH)) || true
	@$(BIN)/python -c 'import torchvision' 2> /dev/null || \
	  $(BIN)/python -m pip uninstall -qqy torchvision
	@touch $@
