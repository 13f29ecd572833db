"""Read `transformers` directories and PEFT adapters on each rank, and export them from a checkpoint."""
