"""Two vision encoders whose features are joined patch by patch."""
