"""The CPU library: C++ behind a plain C interface, its build, and what Python needs to call it."""
