"""From a plan to addressed copies that a worker performs."""
