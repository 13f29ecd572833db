"""Choose the checkpoint that a run resumes from, and check that it fits the run."""
