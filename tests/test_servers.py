"""What stands between a client and a server that dies."""

import socket
import threading
from contextlib import suppress

import pytest

from tests.processes import wait_for
from tests.servers import Wire

PATIENCE = 10  # seconds in which a client must learn that its server is gone
QUESTION = b"to which there is no answer"


class Silent(threading.Thread):
    """A server that reads what its clients send and never answers.

    Attributes:
        connections: to its clients.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections: list[socket.socket] = []

    def run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self.read, args=(connection,), daemon=True).start()

    @staticmethod
    def read(connection: socket.socket) -> None:
        with suppress(OSError):
            while connection.recv(1 << 16):
                pass

    def die(self) -> None:
        for each in (self.listener, *self.connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_clients_that_wait_for_an_answer_learn_that_the_server_died(clients: int) -> None:
    server = Silent()
    server.start()
    wire = Wire(server.listener.getsockname()[1], clients * len(QUESTION) + 1, server.die)
    wire.start()
    waiting = [socket.create_connection(("127.0.0.1", wire.port), timeout=PATIENCE) for _ in range(clients)]
    for client in waiting:
        client.sendall(QUESTION)
    wait_for(lambda: wire.left == 1 and len(server.connections) == clients, PATIENCE, "questions")
    waiting[0].sendall(b"?")
    for client in waiting:
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", wire.port), timeout=PATIENCE)
