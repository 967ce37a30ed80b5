"""API keys, roles and signed completion ids."""
