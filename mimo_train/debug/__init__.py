"""Diagnosis of runs: non-finite values, suspect losses, profiles."""
