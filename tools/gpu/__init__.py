"""The parts of tools/gpu_check: each runs in a process of its own and says what it found in rows."""
