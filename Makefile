# One command each. Every target does its own set-up; none needs root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE_SOURCES := $(wildcard native/*.h native/build_ffi.py $(foreach folder,native/* native/*/*,$(folder)/*.[ch]))
NATIVE_STYLED := $(shell find native -name build -prune -o -name "*.[ch]" -print)

.PHONY: demo demo-queue demo-spark cluster example test durations test-long chaos chaos-cluster attack fuzz bench bench-peers lint lint-c format wheels venv clean native-test

venv: $(VENV)/.installed

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# Editable, so that a changed Python file needs no new install; a changed C file causes a rebuild.
$(VENV)/.installed: $(VENV)/.created pyproject.toml setup.py $(filter-out native/tests/% native/examples/%,$(NATIVE_SOURCES))
	$(BIN)/python -m pip install --quiet --editable '.[test,demo]'
	touch $@

demo: venv
	$(BIN)/python -m mqd.cli.main demo

# A thousand jobs, workers that are killed, and a picture of which worker did which job: queue.svg.
demo-queue: venv
	$(BIN)/python examples/jobs/demo.py

# The flights again, through Spark; needs Java 17. The picture is delays.png.
demo-spark: venv $(VENV)/.spark $(VENV)/.charts
	$(BIN)/python -m mqd.cli.main demo-spark

# PySpark is half a gigabyte: only targets that need it install it.
$(VENV)/.spark: $(VENV)/.installed
	-$(BIN)/python -m pip install --quiet --editable '.[spark]'
	touch $@

# Three brokers on this machine, in the foreground; prints commands to try with them.
cluster: venv
	$(BIN)/python -m mqd.cli.main cluster local

# The C client as a library and two programs on it: native/examples/README.md.
example:
	$(MAKE) -C native/examples

native-test:
	$(MAKE) -C native/tests check

# tests/run_quick.py runs native-test too, in parallel with tests that mostly wait.
test: lint $(VENV)/.spark
	$(BIN)/python -m tests.run_quick

# The same, and writes what the slowest tests cost to tests/durations.json. For a quiet machine.
durations: lint $(VENV)/.spark
	$(BIN)/python -m tests.run_quick --keep

# tests/unit/native/test_core_long.py runs the core's own tests.
test-long: lint-c $(VENV)/.spark
	$(BIN)/python -m pytest -q --tier=long

# Kills, power cuts and failing disks, all rounds.
chaos: venv
	$(BIN)/python -m pytest -q --tier=long tests/crash

# Brokers in network namespaces, cut off, killed, stopped; every third run with queues; needs root. ARGUMENTS="--seconds 3600" for longer than ten minutes; python -m tests.chaos --help.
chaos-cluster: venv
	$(BIN)/python -m tests.chaos $(ARGUMENTS)

# A secured broker under bad input, floods, kills, cuts and damaged files, while other clients must not be affected. ARGUMENTS="--seed 7 --seconds 3600 --count 5000" for longer than ten minutes.
attack: venv
	$(BIN)/python -m tests.attack $(ARGUMENTS)

fuzz: venv
	$(BIN)/python -m tests.attack.fuzz_sasl
	$(MAKE) -C native/tests fuzz

bench: venv
	$(BIN)/python -m perf

# Compares mqd with Apache Kafka, NATS JetStream, RabbitMQ streams and Redis Streams; 70 minutes at most. ARGUMENTS=--quick is a short run.
bench-peers: venv $(VENV)/.charts
	$(BIN)/python -m perf peers $(ARGUMENTS)

# The library that draws charts; measurements do not need it.
$(VENV)/.charts: $(VENV)/.installed
	-$(BIN)/python -m pip install --quiet 'matplotlib>=3.8,<4'
	touch $@

# The sdist and manylinux wheels for x86_64 and aarch64, into dist/.
wheels: venv
	$(BIN)/python -m pip install --quiet --editable '.[package]'
	$(BIN)/python native/wheels.py

# The tools as pyproject.toml pins them; without the package, which would be built again.
$(VENV)/.lint: $(VENV)/.installed pyproject.toml
	$(BIN)/python -m pip install --quiet $$($(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["lint"])')
	touch $@

# tests/tidy: layers of imports and includes, lengths, commit titles, names on the pages. mypy caches its results in
# .mypy_cache: 15 CPU-seconds the first time, less than one while nothing changes.
lint: $(VENV)/.lint
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_STYLED)
	$(BIN)/python -m pytest -q tests/tidy

# Formats all files, and fixes what ruff can fix.
format: $(VENV)/.lint
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(NATIVE_STYLED)

# clang-tidy over the C core, with the checks of native/.clang-tidy. Takes a minute, so it is part of test-long and not of lint.
lint-c: $(VENV)/.lint
	$(BIN)/clang-tidy --quiet $(filter-out native/tests/%,$(filter %.c,$(NATIVE_SOURCES))) -- -std=gnu11 -D_GNU_SOURCE -Inative

clean:
	rm -rf $(VENV) build *.egg-info mqd/_native.c mqd/*.so
