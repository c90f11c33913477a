"""Learn an engine's layout by following its own weight loader."""
