"""The config of a run: dataclasses with their checks, and their composition from YAML and overrides. No torch."""
