from __future__ import annotations

from hypothesis import settings

# No deadline: a busy machine makes no test wrong. Fewer examples than the default keep `make unit`
# short; what they find is kept in .hypothesis.
settings.register_profile("unit", deadline=None, max_examples=60)
settings.load_profile("unit")
