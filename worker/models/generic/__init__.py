"""Decoders that no family here reads: transformers' modeling code on our paged cache and our linear layers.

A wing: the frontend asks `plan` in a child process, the worker calls `load`. What a class of transformers
computes is seen by running it: which attention it calls, with which keywords, under which masks. What is seen
and not covered is refused by name. No code of a checkpoint is run, and transformers opens no file.
"""
