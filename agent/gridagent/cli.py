"""`gridagent`: the command line of a node. Everything heavy is imported by the command that needs it."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from gridagent import __version__
from gridagent.errors import AgentError
from gridagent.home import DEFAULT_HOME, Home

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
STATUS_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit status: 0 done, 1 refused or failed (the reason is on stderr), 2 wrong usage,
    130 interrupted.
    """
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except AgentError as error:
        print(f"gridagent: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"gridagent: {error.strerror or error}: {error.filename or arguments.home}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gridagent", description="The agent of one node.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        if name != "version":
            home = os.environ.get("GRIDAGENT_HOME", DEFAULT_HOME)
            sub.add_argument("--home", default=home, help=f"the agent's folder (now {home})")
        return sub

    serve = add("serve", _serve, "Serve this node until SIGTERM.")
    serve.add_argument(
        "--allow-damage",
        action="store_true",
        help="let a drill spoil a hand-over on purpose (never on a production node)",
    )
    execute = add("exec", _exec, "Register a rank with the agent, then become it.")
    execute.add_argument("--job", required=True)
    execute.add_argument("argv", nargs="+", metavar="-- PROGRAM ARGS")
    add("park", _park, "Wait as a warm spare until a rank is given to this process.")
    join = add("join", _join, "Enrol this node with a one-time token.")
    join.add_argument(
        "token", metavar="TOKEN", help="what `gridctl enroll NODE` printed; - reads it from stdin"
    )
    add("status", _status, "What the agent that serves this home says of itself.")
    add("version", _version, "Print the version.")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from gridagent.daemon import serve

    return serve(Home(arguments.home), allow_damage=arguments.allow_damage)


def _exec(arguments: argparse.Namespace) -> int:
    from gridagent.launch import LaunchError, register

    home = Home(arguments.home)
    argv: list[str] = arguments.argv
    environment = register(home, home.config(), arguments.job, argv)
    if not _answers(home):
        print(
            f"gridagent: nothing serves {home.root} yet: no rank here can move until it does", file=sys.stderr
        )
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be run: {error.strerror}") from None


def _park(arguments: argparse.Namespace) -> int:
    from gridagent.launch import session_environment

    if find_spec("torch") is None:
        raise AgentError(
            f"a spare is to become a rank, and {sys.executable} has no torch: park in the environment that"
            " trains"
        )
    home = Home(arguments.home)
    config = home.config()
    os.environ.update(session_environment(home, config, job=""))
    doing = "waits for a rank" if _answers(home) else f"waits for `gridagent serve --home {home.root}`"
    print(f"gridagent: a spare of node {config.node}; it {doing}", file=sys.stderr, flush=True)
    os.environ["GRIDAGENT_ROLE"] = "spare"
    from gridagent.train import park

    return int(park.main() or 0)


def _answers(home: Home) -> bool:
    """Whether an agent listens on the node's socket."""
    import socket

    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(home.socket))
        except OSError:
            return False
    return True


def _join(arguments: argparse.Namespace) -> int:
    from gridagent.enrolment import join_command

    return join_command(arguments)


def _status(arguments: argparse.Namespace) -> int:
    import http.client

    from gridagent import identity

    home = Home(arguments.home)
    try:
        host, _, port = home.url_file.read_text().removeprefix("https://").rpartition(":")
        connection = http.client.HTTPSConnection(
            host.strip("[]"), int(port), timeout=STATUS_S, context=identity.client_context(home.trust)
        )
        connection.request("GET", "/v1/status")
        answer = json.loads(connection.getresponse().read())
    except (OSError, ValueError, http.client.HTTPException, identity.IdentityError) as error:
        raise AgentError(f"the agent of {home.root} gives no answer ({error}); is it running?") from None
    print(json.dumps(answer, indent=2))
    return 0


def _version(_: argparse.Namespace) -> int:
    print(__version__)
    return 0
