"""Diagnosis of runs: non-finite values, suspect losses, stragglers, profiles."""
