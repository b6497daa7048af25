"""What a run leaves on disk: directory, messages and status, metrics, checkpoints, profiles, videos. Trains nothing."""
