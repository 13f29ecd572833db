"""Rows of datasets: which columns are media, and the samples that rows become."""
