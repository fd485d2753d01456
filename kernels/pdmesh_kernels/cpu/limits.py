"""What the CPU library can hold, for those who must know it before anything is loaded: imports nothing."""

TOKEN_TILE = 32
"""A block holds a multiple of so many tokens."""
MAX_HEAD_DIM = 256
"""Numbers in a head, which are even."""
