"""`python -m mqd`: the command `mqd`."""

from mqd.cli.main import main

main()
