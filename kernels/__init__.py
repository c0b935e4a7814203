"""One operation a file: formula, torch reference, kernels, launcher."""
