"""Code that runs only on a CPU: the CPU backend that replaces CUDA, and the fast paths of `run.cpu_kernels`."""
