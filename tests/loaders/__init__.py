"""Random loaders, and a judge of the layouts that are learned from them."""
