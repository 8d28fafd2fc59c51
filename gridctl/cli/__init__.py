"""The command line: asks the controller and prints; decides nothing."""


def main() -> None:
    """Entry point of the console script `gridctl`."""
    from gridctl.cli.app import invoke

    invoke()
