"""The config of a run: dataclasses with their checks, composed from YAML files and overrides."""
