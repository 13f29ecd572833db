"""What only a CPU runs: the stand-in for CUDA, and fast paths behind `run.cpu_kernels`."""
