"""Needles in a haystack: rows whose beginning must be read to answer what is asked at their end."""
