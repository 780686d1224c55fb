"""Algorithms of research papers that few runs use; each is its file, as those of `gerl.algorithms` are."""
