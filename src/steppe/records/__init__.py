"""What a run leaves behind: its directory, messages and state, curves, checkpoints, pictures. Reads and writes, never trains."""
