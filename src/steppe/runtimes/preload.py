"""What the fork server imports before it forks, so that a role's process starts in a fraction of a second.

Only imports: a fork after torch has run on several threads can hang.
"""

import steppe.runtimes.wiring
import steppe.transport.shm  # noqa: F401
