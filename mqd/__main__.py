"""`python -m mqd`, and the command `mqd`."""

import os
import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The imports take a tenth of a second, and a KeyboardInterrupt during them would print a
        # traceback. The status is mqd.cli.common.EXIT_INTERRUPTED.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from mqd.cli.main import main as command

    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
