"""Where Python looks for a user's own modules: encoders, callbacks. Imports no torch."""

import os
import sys


def search_working_directory() -> None:
    """Let modules of the working directory be found, behind everything else, so that they hide no installed package.
    The scripts and the `mimo-train` command leave it off Python's path."""
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        return
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
