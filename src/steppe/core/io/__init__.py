"""Bytes and files: the codec, atomic files, rows in chunks, validation of records from outside."""
