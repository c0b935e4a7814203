"""Runs what README.md and docs/ show, in a fresh clone, and compares the answers that they show."""
