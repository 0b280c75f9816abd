# Every target makes `.venv` itself and is quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .peers

.PHONY: install demo test check peers clean

install: $(STAMP)
	@$(BIN)/python -m turnkv.models

$(STAMP): pyproject.toml requirements.lock CMakeLists.txt $(wildcard csrc/*.h csrc/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "turnkv needs Python 3.11 or newer; call: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/turnkv demo --out out

test: install
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

check: install
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

peers:
	scripts/peers $(PEERS)

clean:
	rm -rf $(VENV) $(PEERS) build out
