"""`python -m mqd.cli`."""

from mqd.cli.main import main

main()
