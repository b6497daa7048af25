"""Where experience is stored: columns in memory or on disk, batches out of them, snapshots."""
