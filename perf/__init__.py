"""What mqd costs: `make bench`. See README.md."""
