"""Child processes: started, watched, killed and replaced."""
