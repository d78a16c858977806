"""Linear layers whose matrix products and all-gathers are in float8."""
