"""What went wrong, or slow: values that are not finite, suspect losses, stragglers, profiles."""
