"""The data plane: whole prompt groups from producers to consumers, each exactly once.

``protocol`` is what the other stages see; ``ledger`` holds the rules, in pure Python; ``ray_plane`` runs the ledger
in a Ray actor with payloads in Ray's object store. Importing this package does not load Ray.
"""

from stretto.plane.protocol import DataPlane, Lease, PlaneError, PlaneStats, Producer

__all__ = ["DataPlane", "Lease", "PlaneError", "PlaneStats", "Producer"]
