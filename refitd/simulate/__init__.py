"""How long a planned refit takes on a cluster that is not there: flows share its cables fairly."""
