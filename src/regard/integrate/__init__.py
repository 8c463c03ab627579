"""regard inside other libraries: the attention of transformers' models, and checkpoints to try it on.

Nothing else in regard imports this room, and `import regard` does not load it.
"""
