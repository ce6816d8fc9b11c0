"""Replay decoding for state-space and linear-attention models.

The recurrent state is kept as a checkpoint, the inputs of the last few tokens in a ring, and what a step needs is
rebuilt from both. Importing the package loads nothing heavy: each family is imported on its own,
``from replayssm.mamba import checkpointing_ssu``.
"""

__version__ = "0.1.0"
