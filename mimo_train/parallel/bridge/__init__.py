"""How features travel from encoders to the language model, and gradients back: what is planned, who talks to whom,
and the communicators of the pipeline schedule."""
