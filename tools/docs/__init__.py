"""The reference parts of docs/, written from what they are about: parsers, routes, metrics, limits.

In a checkout only: `python -m quire.tools.docs` writes them, and a test fails when they are stale. What
renders a part is a function without arguments.
"""
