"""report.html: one page about a run. Imports no torch."""
