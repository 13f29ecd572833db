"""What holds for every test."""

from hypothesis import settings

# The same examples on every machine, however slow it is; --hypothesis-profile=random draws others.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("random", database=None, deadline=None)
settings.load_profile("fixed")
