"""Reference experiments: measured, evaluated exactly where that is possible, and verified."""
