"""A model that another program trains and asks for text, for example a framework of reinforcement learning."""
