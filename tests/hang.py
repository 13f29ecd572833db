"""How long a test waits for what must happen."""

HANG_SECONDS = 900
"""For one event: a guard against waiting for ever and no measure of speed, ten times what anything takes on a busy
machine. pytest's own guard, `timeout` in pyproject.toml, is above it, so that a test tells itself what hangs."""
