"""What security costs."""
