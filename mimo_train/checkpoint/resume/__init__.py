"""Which checkpoint a run resumes from, and whether it fits the run."""
