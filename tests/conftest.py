"""What every test shares: one torch thread, and property tests without a clock."""

from hypothesis import settings

settings.register_profile("riacho", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("riacho")

try:
    import torch
except ImportError:  # the app's tests run without it
    pass
else:
    torch.set_num_threads(1)
