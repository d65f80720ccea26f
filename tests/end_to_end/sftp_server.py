"""An SFTP server as a process of its own: `python sftp_server.py FOLDER`.

Prints its port and serves the folder on loopback until it is killed. Needs asyncssh.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

USER, SECRET = "user", "very-secret-value"


async def serve(folder: str) -> None:
    import asyncssh

    class Server(asyncssh.SSHServer):  # type: ignore[misc, name-defined]
        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return (username, password) == (USER, SECRET)

    def files(connection: Any) -> Any:
        return asyncssh.SFTPServer(connection, chroot=folder.encode())

    keys = [asyncssh.generate_private_key("ssh-ed25519")]
    server = await asyncssh.listen("127.0.0.1", 0, server_factory=Server, server_host_keys=keys, sftp_factory=files)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
