"""One file per engine; registry.py lists them, base.py holds what they share."""
