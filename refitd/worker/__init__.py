"""The worker process of a daemon."""
