"""`python -m poisoned_fake ROLE`: poisoned.py with fake workers, which start and die at once."""

from __future__ import annotations

import fake_process
from poisoned import poison_steps

MODULE = "poisoned_fake"


def main() -> None:
    fake_process.use_fake_worker()
    if fake_process.is_worker():
        poison_steps()
    fake_process.run(MODULE)


if __name__ == "__main__":
    main()
