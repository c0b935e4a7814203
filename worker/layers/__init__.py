"""The layers that model code is written against."""
