"""Value tables that several workers update: in shared memory, or through messages to the table's owner."""
