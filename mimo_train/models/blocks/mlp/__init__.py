"""The feed-forward block."""
