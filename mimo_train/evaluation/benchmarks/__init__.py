"""Benchmarks of lmms-eval: its tasks and metrics on our models, in this process or from a server of vLLM."""
