"""The cost of security."""
