"""The processes of a run: how they are started, and which ranks they are."""
