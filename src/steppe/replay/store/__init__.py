"""Storage of experience: columns in memory or on disk, batches gathered from them, snapshots."""
