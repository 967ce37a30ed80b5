"""What every test shares: one torch thread, and property tests without a clock."""

import os

from hypothesis import settings

from tests.postgres import database_url, empty_url, postgres, postgres_url  # noqa: F401 - fixtures

# CI judges a change, so it draws the same examples every time; elsewhere each run looks further.
settings.register_profile("riacho", deadline=None, max_examples=60, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("riacho")

try:
    import torch
except ImportError:  # the app's tests run without it
    pass
else:
    torch.set_num_threads(1)
