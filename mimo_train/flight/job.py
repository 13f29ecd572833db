"""The job of a scheduler that a process belongs to. Imports no torch."""

import os


def scheduled_job() -> str:
    """Its name, another one at every start: `slurm-JOB.RESTART`. Empty where there is none."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"slurm-{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else ""
