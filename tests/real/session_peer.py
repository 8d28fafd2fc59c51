"""A process that speaks a session's side of the agent's Unix socket, without torch.

usage: session_peer.py SOCKET HELLO.json        (the fields of wire.Hello but pid)

stdin, one JSON object a line, says what it does: {"send": {...message...}}, {"hold": KIND} and
{"let": KIND} (replies to that command wait), {"fail": KIND, "error": TEXT}. It reconnects by itself.
stdout, one JSON object a line, says what it saw: commands, answers, connects.
"""

import json
import os
import queue
import socket
import sys
import threading
import time

import msgspec

from gridagent import framing, wire


class Peer:
    def __init__(self, path: str, hello: dict[str, object]) -> None:
        self.path = path
        self.hello = hello
        self.held: dict[str, list[wire.Command]] = {}
        self.failing: dict[str, str] = {}
        self.inbox: queue.Queue[dict[str, object] | wire.Message | None] = queue.Queue()
        self.sock: socket.socket | None = None

    def run(self) -> None:
        threading.Thread(target=self.read_stdin, daemon=True).start()
        threading.Thread(target=self.read_socket, daemon=True).start()
        while (item := self.inbox.get()) is not None:
            if isinstance(item, wire.Command):
                say(event="command", kind=item.kind, args=item.args)
                if item.kind in self.held:
                    self.held[item.kind].append(item)
                else:
                    self.reply(item)
            elif isinstance(item, wire.Answer):
                say(event="answer", ok=item.ok, value=item.value, error=item.error)
            elif isinstance(item, dict):
                self.obey(item)

    def obey(self, order: dict[str, object]) -> None:
        if "send" in order:
            self.send(msgspec.convert(order["send"], wire.FromSession, builtin_types=()))
        elif "hold" in order:
            self.held[str(order["hold"])] = []
        elif "let" in order:
            for command in self.held.pop(str(order["let"])):
                self.reply(command)
        elif "fail" in order:
            self.failing[str(order["fail"])] = str(order["error"])

    def reply(self, command: wire.Command) -> None:
        if command.kind in self.failing:
            self.send(wire.Reply(id=command.id, ok=False, error=self.failing[command.kind]))
            return
        value: object = {"kind": command.kind, "session": self.hello["session"]}
        if command.kind == "meet":
            value = wire.plain(wire.MeetReply(public_key=b"p" * 32, host="127.0.0.1", port=4711))
        self.send(wire.Reply(id=command.id, ok=True, value=value))

    def send(self, message: wire.Message) -> None:
        if self.sock:
            self.sock.sendall(framing.frame(message))

    def read_stdin(self) -> None:
        for line in sys.stdin:
            self.inbox.put(json.loads(line))
        self.inbox.put(None)

    def read_socket(self) -> None:
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self.path)
                sock.sendall(framing.frame(msgspec.convert({**self.hello, "pid": os.getpid()}, wire.Hello)))
                self.sock = sock
                say(event="connected")
                unframer = framing.Unframer(at_agent=False)
                while data := sock.recv(65536):
                    for message in unframer.feed(data):
                        self.inbox.put(message)
            except OSError:
                pass
            sock.close()
            self.sock = None
            time.sleep(0.05)


def say(**event: object) -> None:
    print(json.dumps(event, default=lambda raw: raw.hex()), flush=True)


if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        Peer(sys.argv[1], json.load(file)).run()
