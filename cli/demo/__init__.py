"""The demo: a model in training, two engines that serve it, and a proof that they hold the same weights."""
