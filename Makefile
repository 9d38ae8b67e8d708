# The two commands: `make demo` shows it, `make test` proves it. Both set up .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests start many processes; without bytecode each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-cpu test-gpu test-peers test-all fuzz coverage lint types docs format clean

demo: $(READY)
	$(BIN)/python -m examples.demo

# Tests share the cores, file by file, but for those with a wire between hosts, which takes a core for itself.
HOSTS := tests/failures/test_hosts.py tests/failures/test_cut_off.py

test: lint types test-cpu test-gpu

test-cpu: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(HOSTS))
	$(BIN)/python -m pytest $(HOSTS)

# CUDA and NCCL code on pretend GPUs (tests/pretend), which g++ compiles; without g++ they are skipped. Many of these
# tests wait for silent ranks, so there is one more worker than cores.
test-gpu: $(READY)
	$(BIN)/python -m tests.pretend -n 3 --dist loadfile --no-loadscope-reorder

# Every loss type and option of TRL's trainers, by the plain class and through a pipeline: equal, refused, or wrong. The
# last line is one JSON object. `make test-peers KINDS="SFT DPO"` runs some. Nothing is fetched but by the setup.
test-peers: $(READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.peers $(KINDS)

# Every combination of layout and order, too, and random examples that differ from run to run: `make test-all SEED=...`
# repeats those of one. Half an hour on two cores.
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

test-all: lint types
	$(BIN)/python -m pytest -m '' -n auto --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(HOSTS)) \
		--hypothesis-profile=explore --hypothesis-seed=$(SEED) || { echo "examples were drawn with SEED=$(SEED)"; exit 1; }
	$(BIN)/python -m pytest -m '' $(HOSTS)
	$(BIN)/python -m tests.pretend -m '' -n 3 --dist loadfile --no-loadscope-reorder

# Random models, plans and options, each against the plain model: CASES of them, or as many as SECONDS allow. SEED is
# printed and repeats a run. What fails is made smaller and printed as a program. The last line is one JSON object.
CASES ?= 10000
SECONDS ?= inf
JOBS ?= $(shell nproc)

fuzz: $(READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.fuzz --cases $(CASES) --seed $(SEED) \
		--seconds $(SECONDS) --jobs $(JOBS)

# The same tests with coverage, which makes them slower: for the nightly run.
coverage: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pytest-cov
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(HOSTS)) \
		--cov=terapipe --cov-report=term:skip-covered

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# On another core the device of the GPU tests is compiled meanwhile.
types: $(READY)
	$(BIN)/python -m tests.pretend -- true >/dev/null 2>&1 & $(BIN)/mypy; code=$$?; wait; exit $$code

# The documentation site, in build/site. Strict: no broken link, no undocumented public name, nothing from the network.
DOCS := .venv-docs
DOCS_EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	$(DOCS)/bin/python docs/check.py build/site

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-docs .venv-rivals .mypy_cache .pytest_cache .ruff_cache .hypothesis build

# torch first and by itself: the exact pin finds a CPU build where one is at hand. uv installs the rest much faster than
# pip; where it cannot reach what pip is configured for, pip does it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[dev]' \
		|| $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Only the extra `docs`: the site is made from the source as text, without torch.
$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt $$($(DOCS)/bin/python -c '$(DOCS_EXTRA)')
	touch $@
