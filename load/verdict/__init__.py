"""Planted situations: whether the verdict names what is wrong, and how soon."""
