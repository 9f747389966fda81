"""The workflow: the loop, Prefect around it, and the command line. Only this package knows Prefect."""

import os

# Before torch is loaded: OpenMP's threads sleep while they wait. Spinning, two of them on two cores that something else
# also uses made a step five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
