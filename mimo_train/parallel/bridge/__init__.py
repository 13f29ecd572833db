"""Transfer of features between modules and of their gradients back: shapes, routes, and the communicators of the
pipeline schedule."""
