"""A daemon's engines as their supervisor keeps them: started, watched, replaced, drained and ended."""
