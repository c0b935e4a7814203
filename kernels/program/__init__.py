"""The native library: how it is built and loaded, the step's inputs, and the list of operations it runs."""
