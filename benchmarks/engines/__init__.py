"""Refit real engines from real trainers, beside the engines' own methods of loading new weights."""
