# `make train` and `make test` do everything, set-up included.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Of the CUDA library in the source tree: H200, and what drivers translate for others, as
# for Orin. Wheels have code for all, which takes longer to compile.
CUDA_ARCHITECTURES ?= 90-real;80-virtual
CUDA_SETTINGS := --config-settings='cmake.define.DAFJAX_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)'
# Python compiles what is imported when it is; for pip to compile all takes half a minute.
export PIP_COMPILE := 0
# For every process to compile JAX anew would take it four seconds.
export PYTHONDONTWRITEBYTECODE :=
# JAX's CUDA plugin has a folder of its own, so that nothing else finds it.
GPU_PLUGIN := build/gpu-plugin
WITH_PLUGIN := JAX_PLATFORMS=cpu PYTHONPATH="$(abspath $(GPU_PLUGIN))"
# Machine code as users have it; tests otherwise do with worse to save time.
OPTIMIZED := XLA_FLAGS=--xla_backend_optimization_level=3
TEST_GPU_PROGRAMS := $(WITH_PLUGIN) $(OPTIMIZED) $(RUN) -m pytest --numprocesses 2 \
  --dist loadgroup tests/test_gpu_programs.py
SOURCES := pyproject.toml $(shell find xla_ffi -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name CMakeLists.txt -o -name '*.cu' -o -name '*.cmake')

.PHONY: train test test-optimized test-slow test-parity test-foreign test-cuda test-gpu-programs test-all-gpu-programs test-versions test-other-version lint doctor bench bench-gpu-programs bench-machine-code clean

# ResNet-18 on handwritten digits: plain, jax.checkpoint, dafjax at 2 bits.
train: $(VENV)/installed
	$(RUN) -m models.train --compare --width 16 --epochs 8

# Each process compiles on one core or so: two of them are 1.6 times faster than one.
# What a file's tests share is compiled once.
test: $(VENV)/installed
	$(RUN) -m pytest --numprocesses 2 --dist loadfile

# The same, with machine code as users have it.
test-optimized: $(VENV)/installed
	$(OPTIMIZED) $(RUN) -m pytest --numprocesses 2 --dist loadfile

# Statistics with more draws, wheels, full-size models.
test-slow: $(VENV)/installed
	$(OPTIMIZED) $(RUN) -m pytest \
	  -m "slow and not cuda and not parity and not gpu_programs"

# Models beside those of PyTorch `transformers`, in full size too.
test-parity: $(VENV)/installed
	$(RUN) -m pip install --quiet --editable '.[parity]' $(CUDA_SETTINGS)
	$(OPTIMIZED) $(RUN) -m pytest -m parity tests/models

# The kernels under sanitizers, for NEON under qemu-user, for AVX-512 emulated.
test-foreign: $(VENV)/installed
	PATH="$(abspath $(VENV)/bin):$$PATH" bash tests/cpp/foreign.sh

# CUDA kernels through the simulator, in full and under sanitizers; planted bugs; and the
# machine code of a wheel; that the benchmark of CUB compiles.
test-cuda: $(VENV)/installed
	nvcc -std=c++17 -arch=sm_80 -cubin -o /dev/null benchmarks/on_gpu/cub.cu
	PATH="$(abspath $(VENV)/bin):$$PATH" sh tests/cpp/sass.sh
	$(RUN) -m pytest --numprocesses 2 -m "slow or not slow" tests/test_cuda_simulator.py \
	  tests/test_cuda_handlers.py tests/test_cuda_status.py

# Programs for GPUs, compiled by XLA:GPU without a GPU.
test-gpu-programs: $(GPU_PLUGIN)/installed
	$(TEST_GPU_PROGRAMS) -m "gpu_programs and not slow"

# Those for Thor too, and more of what is done for GPUs, each with it and without.
test-all-gpu-programs: $(GPU_PLUGIN)/installed
	$(TEST_GPU_PROGRAMS) -m gpu_programs

# The suite on every supported version of JAX.
test-versions:
	sh tests/versions.sh

# What depends on JAX, on jax 0.12.0.1 (without Python 3.12: on 0.9.2).
test-other-version:
	sh tests/versions.sh --part

lint: $(VENV)/installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright --pythonpath $(RUN)

doctor: $(VENV)/installed
	$(RUN) -m dafjax doctor

# The figures of the README, in the order of its table.
bench: $(VENV)/installed
	$(RUN) -m benchmarks.step_memory
	$(RUN) -m benchmarks.step_memory --batch 64 --no-saved --no-temp --time --rss \
	  --out benchmarks/results/step_time.json
	$(RUN) -m benchmarks.gradient_noise
	$(RUN) -m benchmarks.zoo_memory
	$(RUN) -m benchmarks.memory_model
	$(RUN) -m benchmarks.memory_limits
	$(RUN) -m benchmarks.memory_limits --accumulate \
	  --out benchmarks/results/memory_limits_accumulate.json
	$(RUN) -m benchmarks.passes
	$(RUN) -m benchmarks.codec_throughput
	$(RUN) -m benchmarks.block_layout
	$(RUN) -m benchmarks.quantizer_cost
	$(RUN) -m benchmarks.transformer_memory
	$(RUN) -m benchmarks.transformer_memory --no-temp --time --rss \
	  --out benchmarks/results/transformer_time.json
	$(RUN) -m benchmarks.transformer_memory --layers 24 --width 1024 --heads 16 \
	  --batch 2 --length 512 --lora-rank 8 --out benchmarks/results/lora_memory.json
	$(RUN) -m benchmarks.transformer_memory --model roberta --vocabulary 50265 \
	  --batch 8 --length 128 --lora-rank 8 --out benchmarks/results/roberta_memory.json
	for scan in False True; do \
	  suffix=$$([ $$scan = True ] && echo _scan || true); \
	  $(RUN) -m benchmarks.transformer_memory --layers 24 --width 1024 --heads 16 \
	    --batch 2 --length 512 --lora-rank 8 --no-temp --time --rss --rounds 3 \
	    --scan $$scan --out benchmarks/results/lora_time$$suffix.json && \
	  $(RUN) -m benchmarks.transformer_memory --model roberta --vocabulary 50265 \
	    --batch 8 --length 128 --lora-rank 8 --no-temp --time --rss \
	    --scan $$scan --out benchmarks/results/roberta_time$$suffix.json || exit 1; \
	done
	$(RUN) -m benchmarks.largest_batch
	$(RUN) -m benchmarks.layer_growth
	$(RUN) -m benchmarks.plan_bytes
	$(RUN) -m benchmarks.importance
	$(RUN) -m benchmarks.eager_overhead
	$(RUN) -m benchmarks.pool_fragmentation
	$(RUN) -m benchmarks.pool_speed
	$(RUN) -m benchmarks.pool_step
	$(RUN) -m benchmarks.pool_budget --networks resnet18 --seeds 10 \
	  --out benchmarks/results/pool_budget_resnet18.json
	$(RUN) -m benchmarks.pool_budget --networks gpt2 --seeds 10 \
	  --out benchmarks/results/pool_budget_gpt2.json
	$(RUN) -m benchmarks.bit_allocation
	$(RUN) -m benchmarks.nonlinear_minima
	$(RUN) -m benchmarks.accuracy --seeds 5
	$(RUN) -m benchmarks.accuracy --contenders none fixed adaptive --seeds 5 --width 8 \
	  --epochs 3 --out benchmarks/results/accuracy_adaptive.json
	$(RUN) -m benchmarks.accuracy --model roberta-base --lora 8 --epochs 3 --seeds 6 \
	  --contenders none uniform compress adaptive \
	  --out benchmarks/results/quality_roberta.json
	$(RUN) -m benchmarks.accuracy --model gpt2-medium --lora 8 --epochs 3 \
	  --contenders none uniform compress adaptive \
	  --out benchmarks/results/quality_gpt2.json

# Memory of programs for GPUs, compiled without one; on Orin with convolutions of images
# as Flax has them, and as XLA runs them if it is not told.
bench-gpu-programs: $(GPU_PLUGIN)/installed
	XLA_FLAGS=--xla_gpu_force_conv_nhwc=true $(WITH_PLUGIN) $(RUN) -m benchmarks.gpu_memory
	$(WITH_PLUGIN) $(RUN) -m benchmarks.gpu_memory --devices Orin \
	  --programs resnet18-64 resnet18-256 \
	  --out benchmarks/results/gpu_memory_channels_first.json

# Instructions of CUDA kernels, against the bandwidth of GPUs.
bench-machine-code: $(VENV)/installed
	PATH="$(abspath $(VENV)/bin):$$PATH" sh tests/cpp/sass.sh \
	  benchmarks/results/machine_code.json

# The extra `gpu-programs`, in the version of the jax that is installed. Libraries of
# CUDA and a driver are not needed.
$(GPU_PLUGIN)/installed: $(VENV)/installed
	version=$$($(RUN) -c 'import jax; print(jax.__version__)') && \
	$(RUN) -m pip install --quiet --upgrade --no-deps --target $(GPU_PLUGIN) \
	  "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"
	touch $@

$(VENV)/installed: $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dafjax needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[models,dev]' $(CUDA_SETTINGS)
	touch $@

clean:
	rm -rf $(VENV) build runs
