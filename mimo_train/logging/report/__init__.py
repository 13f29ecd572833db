"""report.html: one page about a run."""
