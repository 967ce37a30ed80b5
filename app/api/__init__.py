"""HTTP in, HTTP out: controllers without business logic."""
