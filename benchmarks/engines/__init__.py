"""Real engines refitted by real trainers, beside the engines' own ways of taking new weights."""
