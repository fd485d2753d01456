"""Operations on tensors that a model is made of, one folder each: `reference.py` defines it, `__init__.py` checks and picks.

Callers use the wrappers; what a wrapper refuses, no implementation has to think of.
"""
