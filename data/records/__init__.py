"""Records of samples as users write them, read as conversations."""
