"""Tables that workers learn together: in shared memory, or by messages."""
