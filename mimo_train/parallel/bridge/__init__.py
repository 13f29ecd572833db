"""Transfer features between modules and their gradients back: shapes, routes and pipeline communicators."""
