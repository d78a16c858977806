"""What a training step takes in memory, predicted from a configuration: no weights, no GPU, no process group.

The engine itself runs on the meta device in a world whose communicators move nothing, and the storages are followed.
"""
