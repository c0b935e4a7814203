"""The engines of one HTTP process: which model each serves, and how they come and go."""
