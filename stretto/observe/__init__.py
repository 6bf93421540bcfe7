"""What a run leaves behind for its reader: events, metrics, manifest, fingerprints."""
