"""What `benchmarks/gpu.sh` measures on a GPU, or on the CPU to try it out."""
