"""Needles in a haystack: rows of tokens that end with questions, whose answers are in the first half of the row."""
