"""The control store as a process on the head node.

`process` starts it, `serve` is its main function, `server`, `server_connection` and `server_state`
serve; `store` and `client_connection` are the client; `wire` is the protocol.
"""
