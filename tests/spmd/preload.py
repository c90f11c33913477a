"""What the fork server imports once for all processes of a pool."""
