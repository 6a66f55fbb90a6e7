"""What stands between a client and a server that dies."""

import socket
from contextlib import suppress

import pytest

from tests.servers import Wire

PATIENCE = 10  # seconds in which a client must learn that its server is gone
QUESTION = b"to which there is no answer"


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_clients_that_wait_for_an_answer_learn_that_the_server_died(clients: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = [server]

        def die() -> None:
            for each in connections:
                each.close()

        wire = Wire(server.getsockname()[1], clients * len(QUESTION) + 1, die)
        wire.start()
        waiting = [socket.create_connection(("127.0.0.1", wire.port), timeout=PATIENCE) for _ in range(clients)]
        for client in waiting:
            connections.append(server.accept()[0])
            client.sendall(QUESTION)
        for connection in connections[1:]:
            assert connection.recv(len(QUESTION), socket.MSG_WAITALL) == QUESTION
        assert wire.left == 1
        waiting[0].sendall(b"?")
        for client in waiting:
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", wire.port), timeout=PATIENCE)
