"""What a run is: dataclasses with their checks, and how YAML files and overrides become them. Imports no torch."""
