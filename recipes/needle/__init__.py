"""Needles in a haystack: rows with questions at the end, whose answers are in the first half of the row."""
