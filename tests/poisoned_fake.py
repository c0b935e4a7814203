"""`python -m poisoned_fake ROLE`: poisoned.py with fake workers, which start and die at once."""

from __future__ import annotations

import fake_process
from poisoned import poison_steps

MODULE = "poisoned_fake"

if __name__ == "__main__":
    fake_process.use_fake_worker()
    poison_steps()  # of a worker; other processes have no steps
    fake_process.run(MODULE)
