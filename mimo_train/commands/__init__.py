"""One file per command of `mimo-train`; `mimo_train.cli` parses and calls them."""
