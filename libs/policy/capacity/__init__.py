"""From demand to GPUs: what phases have to do, how many workers that takes, when those there are run short. Pure."""
